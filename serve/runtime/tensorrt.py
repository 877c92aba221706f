"""TensorRT: its libraries, the shapes that an engine is built for, and the cache of engines."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime

from pipeline.contract.bundle import Bundle
from pipeline.contract.signature import Signature, TensorSpec
from pipeline.system.errors import ResourceError

TENSORRT = "TensorrtExecutionProvider"
_PROVIDER_LIBRARY = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # of cuDeviceGetAttribute: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…

log = logging.getLogger(__name__)


def tensorrt_problem(available: Sequence[str]) -> str:
    """Return why ONNX Runtime cannot use TensorRT here; empty if it should work. Loads TensorRT's libraries."""
    if TENSORRT not in available or not _PROVIDER_LIBRARY.is_file():
        return "the installed onnxruntime has no TensorRT provider (onnxruntime-gpu for Linux has)"
    for name in required_libraries(_PROVIDER_LIBRARY.read_bytes()):
        try:
            _load_library(name)
        except OSError as error:
            cuda, major = onnxruntime.cuda_version.partition(".")[0], name.rpartition(".")[2]
            package = f"tensorrt-cu{cuda}-libs=={major}.*"
            return f"no {name} ({error}), which is in the package {package} or in LD_LIBRARY_PATH"
    return ""


def required_libraries(provider: bytes) -> list[str]:
    """Return the names of TensorRT's libraries, with their version, in the file of ONNX Runtime's provider.

    The first is libnvinfer, which the others need.
    """
    return sorted({name.decode() for name in re.findall(rb"libnv(?:infer|infer_plugin|onnxparser)\.so\.\d+", provider)})


def _load_library(name: str) -> ctypes.CDLL:
    """Load a library from its package in site-packages, where the linker does not search, or from the system."""
    package = importlib.util.find_spec("tensorrt_libs")
    folders = (package.submodule_search_locations or []) if package else []
    path = next((path for folder in folders if (path := Path(folder) / name).is_file()), name)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def provider_options(bundle: Bundle, *, profiles: bool = True) -> dict[str, str]:
    """Return the options of ONNX Runtime's provider, which takes booleans as `True` and `False` only."""
    options = profile_options(bundle.signature) if profiles else {}
    if (folder := engine_cache(bundle.digest, environment())) is not None:
        for kind in ("engine", "timing"):
            options |= {f"trt_{kind}_cache_enable": "True", f"trt_{kind}_cache_path": str(folder)}
    return options


def profile_options(signature: Signature) -> dict[str, str]:
    """Return the shapes that one engine is built for: without them, TensorRT builds another while requests wait.

    Empty where all shapes are fixed, or where an axis has no maximum.
    """
    limits, rows = signature.limits, signature.runtime.batch_rows
    specs = [spec for spec in signature.inputs if any(isinstance(axis, str) for axis in spec.shape)]
    batches = {spec.shape[0] for spec in specs if isinstance(spec.shape[0], str)}
    # One request may have more rows than merged ones together.
    largest = {**limits.axes, **dict.fromkeys(batches, max(rows, limits.max_batch_size))}
    if not specs or any(axis not in largest for spec in specs for axis in spec.shape if isinstance(axis, str)):
        return {}
    smallest = {**dict.fromkeys(largest, 1), **limits.shortest}
    sizes = {"min": smallest, "opt": largest | dict.fromkeys(batches, rows), "max": largest}
    return {
        f"trt_profile_{name}_shapes": ",".join(_shape(spec, axes) for spec in specs) for name, axes in sizes.items()
    }


def _shape(spec: TensorSpec, sizes: Mapping[str, int]) -> str:
    return f"{spec.name}:{'x'.join(str(axis if isinstance(axis, int) else sizes[axis]) for axis in spec.shape)}"


def environment() -> str:
    """Return what an engine is valid for: the device and the versions that built it."""
    library = required_libraries(_PROVIDER_LIBRARY.read_bytes())[0]
    version = _load_library(library).getInferLibVersion()
    return f"{device_name()} onnxruntime {onnxruntime.__version__} tensorrt {version}"


def device_name() -> str:
    """Return the name and the compute capability of the first CUDA device, as in `NVIDIA L4 sm89`."""
    driver = ctypes.CDLL("libcuda.so.1")
    name, device, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    codes = (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetName(name, len(name), device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(codes):
        raise ResourceError(f"provider tensorrt: the NVIDIA driver returns errors {codes} for its first device")
    return f"{name.value.decode()} sm{major.value}{minor.value}"


def engine_cache(digest: str, environment: str) -> Path | None:
    """Return the folder for the engines of a bundle; None where none can be written.

    It is not in the bundle, which may be read-only and has no files but those of its manifest.
    """
    for root in _cache_roots():
        folder = root / digest / re.sub(r"[^A-Za-z0-9.]+", "-", environment)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = root.lstat()
            if status.st_uid != os.getuid() or status.st_mode & 0o022:  # engines are code: only this user may write
                continue
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    log.warning("engines of TensorRT are not kept: no folder for them in XDG_CACHE_HOME and TMPDIR can be written")
    return None


def _cache_roots() -> list[Path]:
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    roots = [home / "pipe" / "tensorrt", Path(tempfile.gettempdir()) / f"pipe-tensorrt-{os.getuid()}"]
    return [root for root in roots if root.is_absolute()]  # without a home, `~` is not replaced
