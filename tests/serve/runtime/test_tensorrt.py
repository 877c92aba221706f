"""Options for ONNX Runtime's TensorRT provider; `tests/gpu` runs it on a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from pipeline.contract.bundle import Bundle
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import BundleError, ResourceError
from serve.runtime import session as runtime_session
from serve.runtime import tensorrt
from serve.runtime.session import CPU, CUDA, Session, choose_providers
from serve.runtime.tensorrt import TENSORRT, engine_cache, profile_options, required_libraries, tensorrt_problem

DEVICE = "NVIDIA L4 sm89 onnxruntime 1.31.1 tensorrt 101601"


def _signature(
    *shapes: tuple[int | str, ...], rows: int = 32, axes: Mapping[str, int] | None = None, **limits: Any
) -> Signature:
    return Signature(
        inputs=tuple(TensorSpec(name=f"x{i}", datatype="FP32", shape=shape) for i, shape in enumerate(shapes)),
        outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch",)),),
        codec="",
        limits=Limits(max_batch_size=64, max_body_bytes=1, axes=axes or {}, **limits),
        runtime=Runtime(provider="tensorrt", threads=0, batch_rows=rows),
    )


@pytest.mark.parametrize(
    ("signature", "shapes"),
    [
        (_signature(("batch", 3, 8)), ("x0:1x3x8", "x0:32x3x8", "x0:64x3x8")),
        (_signature(("batch", 3), rows=100), ("x0:1x3", "x0:100x3", "x0:100x3")),
        (
            _signature(("batch", "length"), ("batch", 2, "length"), axes={"length": 128}),
            ("x0:1x1,x1:1x2x1", "x0:32x128,x1:32x2x128", "x0:64x128,x1:64x2x128"),
        ),
        (
            _signature(("batch", "length"), axes={"length": 128}, shortest={"length": 28}),
            ("x0:1x28", "x0:32x128", "x0:64x128"),
        ),
        (_signature(("batch", 3), (5,)), ("x0:1x3", "x0:32x3", "x0:64x3")),
        (_signature((4, 3)), None),
        (_signature(("batch", "length")), None),
        (_signature(()), None),
    ],
)
def test_one_engine_is_built_for_all_accepted_shapes(signature: Signature, shapes: tuple[str, ...] | None) -> None:
    names = [f"trt_profile_{name}_shapes" for name in ("min", "opt", "max")]
    assert profile_options(signature) == (dict(zip(names, shapes, strict=True)) if shapes else {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def test_engines_are_kept_for_bundle_device_and_versions(cache: Path) -> None:
    folder = engine_cache("a" * 64, DEVICE)
    assert folder == cache / "cache/pipe/tensorrt" / ("a" * 64) / "NVIDIA-L4-sm89-onnxruntime-1.31.1-tensorrt-101601"
    others = {engine_cache("b" * 64, DEVICE), engine_cache("a" * 64, DEVICE.replace("89", "90"))}
    assert len(others - {folder, None}) == 2


@pytest.mark.parametrize("home", ["a file", "writable by others"])
def test_without_a_safe_home_engines_are_in_tmpdir(cache: Path, home: str) -> None:
    if home == "a file":
        (cache / "cache").touch()
    else:
        (cache / "cache/pipe/tensorrt").mkdir(parents=True)
        (cache / "cache/pipe/tensorrt").chmod(0o777)
    folder = engine_cache("a", DEVICE)
    assert folder is not None
    assert folder.parents[2] == cache / "tmp"
    assert not folder.parents[1].stat().st_mode & 0o077


def test_missing_cache_folder_is_logged(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "cache").touch()
    (cache / "tmp").rmdir()
    (cache / "tmp").touch()
    assert engine_cache("a", DEVICE) is None
    assert "are not kept" in caplog.text


def test_provider_gets_its_cache_and_shapes(bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "environment", lambda: DEVICE)
    options = tensorrt.provider_options(bundle)
    folder = str(engine_cache(bundle.digest, DEVICE))
    cached = {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": folder,
    }
    assert options == {**profile_options(bundle.signature), **cached}
    assert options["trt_profile_min_shapes"] == "image:1x1x8x8"
    assert tensorrt.provider_options(bundle, profiles=False) == cached


def test_missing_tensorrt_is_the_reported_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no TensorRT provider" in tensorrt_problem([CPU, CUDA])
    library = tmp_path / "provider.so"
    library.write_bytes(
        b"\0libnvonnxparser.so.10\0libnvinfer_plugin.so.10\0libnvinfer.so.10\0libnvinfer.so.10\0libnvinfer\0"
    )
    names = ["libnvinfer.so.10", "libnvinfer_plugin.so.10", "libnvonnxparser.so.10"]
    assert required_libraries(library.read_bytes()) == names
    monkeypatch.setattr(tensorrt, "_PROVIDER_LIBRARY", library)
    monkeypatch.setattr(onnxruntime, "cuda_version", "13.0")

    def fail(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(tensorrt, "_load_library", fail)
    problem = tensorrt_problem([TENSORRT, CUDA, CPU])
    assert problem.startswith("no libnvinfer.so.10 (libnvinfer.so.10: cannot open shared object file), which is in the")
    assert "tensorrt-cu13-libs==10.*" in problem


def test_library_of_the_package_is_loaded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorrt_libs").mkdir()
    (tmp_path / "tensorrt_libs/__init__.py").touch()
    (tmp_path / "tensorrt_libs/libnvinfer.so.10").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[str] = []
    monkeypatch.setattr("ctypes.CDLL", lambda name, _mode: loaded.append(name))
    tensorrt._load_library("libnvinfer.so.10")
    tensorrt._load_library("libnvonnxparser.so.10")
    assert loaded == [str(tmp_path / "tensorrt_libs/libnvinfer.so.10"), "libnvonnxparser.so.10"]


def _driver(code: int) -> SimpleNamespace:
    def name(buffer: Any, _length: int, _device: Any) -> int:
        buffer.value = b"NVIDIA L4"
        return code

    def attribute(pointer: Any, number: int, _device: Any) -> int:
        pointer._obj.value = {75: 8, 76: 9}[number]
        return 0

    return SimpleNamespace(
        cuInit=lambda _flags: 0,
        cuDeviceGet=lambda _pointer, _ordinal: 0,
        cuDeviceGetName=name,
        cuDeviceGetAttribute=attribute,
    )


def test_device_has_a_name_and_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: _driver(0))
    assert tensorrt.device_name() == "NVIDIA L4 sm89"
    monkeypatch.setattr("ctypes.CDLL", lambda _name: _driver(101))
    with pytest.raises(ResourceError, match=r"errors .*101"):
        tensorrt.device_name()


def test_tensorrt_takes_precedence_over_cuda_and_does_not_fall_back() -> None:
    assert choose_providers("tensorrt", "") == ([TENSORRT, CUDA, CPU], "")
    with pytest.raises(ResourceError, match=r"provider tensorrt: no device; .* --provider cpu, cuda or auto"):
        choose_providers("tensorrt", "no device")


class _Loads:
    """Loads on the CPU what was requested of TensorRT; fails with explicit shapes if `fails`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.profiles: list[bool] = []

    def __call__(self, bundle: Bundle, options: Any, providers: Any, **_: Any) -> Any:
        name, settings = providers[0]
        assert (name, providers[1:]) == (TENSORRT, [CUDA, CPU])
        self.profiles.append("trt_profile_min_shapes" in settings)
        if self.fails and self.profiles[-1]:
            raise BundleError("needs the shapes of all dynamic inputs")
        return onnxruntime.InferenceSession(str(bundle.model), options, providers=[CPU])


@pytest.mark.parametrize("fails", [False, True])
def test_engines_without_explicit_shapes_replace_those_that_fail(
    bundle: Bundle, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    loads = _Loads(fails)
    monkeypatch.setattr(runtime_session, "cuda_problem", lambda _: "")
    monkeypatch.setattr(tensorrt, "tensorrt_problem", lambda _: "")
    monkeypatch.setattr(tensorrt, "environment", lambda: DEVICE)
    monkeypatch.setattr(runtime_session, "_load", loads)
    with (
        caplog.at_level(logging.WARNING, logger="serve"),
        pytest.raises(ResourceError, match="could not load TensorrtExecutionProvider"),
    ):
        Session(bundle, "tensorrt", 1)
    assert loads.profiles == ([True, False] if fails else [True])
    assert ("built-for-new-shapes" in caplog.text) == fails


def test_language_models_do_not_run_on_tensorrt(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_session, "cuda_problem", lambda _: "")
    signature = bundle.signature.model_copy(update={"generation": SimpleNamespace()})
    with pytest.raises(ResourceError, match="cache of a language model grows"):
        Session(replace(bundle, signature=signature), "tensorrt", 1)
