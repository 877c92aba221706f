"""Check this machine: Python, torch, GPUs, launchers, ONNX Runtime, container builders, cluster, disk and memory."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.history import installed_versions
from pipeline.system.errors import install_command

_TIMEOUT_SECONDS = 60
_GIB = 1 << 30

# Run in its own process: torch takes seconds to load, and a broken one must not end this process.
_TORCH_PROGRAM = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "built_for": torch.version.cuda, "cuda": cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "cudnn": torch.backends.cudnn.version() if cuda else None,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else None,
    "gloo": dist.is_gloo_available(),
}))
"""
_RUNTIME_PROGRAM = """
import json, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}))
"""
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")  # they install the same module, so only one of them may be installed


@dataclass(frozen=True)
class Finding:
    what: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def check_machine(folder: Path) -> list[Finding]:
    checks: list[Callable[[], list[Finding]]] = [_python, _torch, launchers, _runtime, _builders, _cluster]
    return [finding for check in checks for finding in check()] + [disk(folder), shared_memory(Path("/dev/shm"))]  # noqa: S108


def _python() -> list[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return [Finding("python", "ok" if fits else "fail", version, "" if fits else "use Python 3.11, 3.12 or 3.13")]


def _torch() -> list[Finding]:
    facts = _run_program(_TORCH_PROGRAM)
    if facts is None:
        return [Finding("torch", "fail", "does not import", install_command("train"))]
    return check_torch(facts, _has_gpu())


def _has_gpu() -> bool:
    return bool(list(Path("/dev").glob("nvidia[0-9]*")))


def check_torch(facts: Mapping[str, Any], gpu_present: bool) -> list[Finding]:
    findings = [Finding("torch", "ok", facts["version"])]
    if facts["cuda"]:
        detail = f"{', '.join(facts['gpus'])}; CUDA {facts['built_for']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}"
        findings.append(Finding("gpu", "ok", detail))
    elif gpu_present:
        built = f"built for CUDA {facts['built_for']}" if facts["built_for"] else "built without CUDA"
        findings.append(
            Finding(
                "gpu",
                "fail",
                f"a GPU is there, but torch ({built}) cannot use it",
                "install a matching torch or driver",
            )
        )
    else:
        findings.append(Finding("gpu", "warn", "none; training runs on CPU", "nothing to fix, unless you expected one"))
    if not facts["gloo"]:
        findings.append(Finding("gloo", "fail", "torch has no gloo backend", "install a standard build of torch"))
    return findings


def launchers() -> list[Finding]:
    """Find the programs that can start the processes of training; torchrun comes with torch."""
    programs = ["torchrun", *(name for name in ("mpirun", "srun", "horovodrun") if shutil.which(name))]
    detail = f"{', '.join(programs)}; train.compress helps on slow networks (100 Mbit/s), not within a machine"
    return [Finding("launchers", "ok", detail)]


def _runtime() -> list[Finding]:
    installed = [name for name in _RUNTIMES if installed_versions((name,))]
    return [check_runtime(_run_program(_RUNTIME_PROGRAM), installed, _has_gpu())]


def check_runtime(facts: Mapping[str, Any] | None, installed: Sequence[str], gpu_present: bool) -> Finding:
    """Check which package of ONNX Runtime is installed, and whether it fits this machine."""
    install = f"pip install 'pipe-road[serve{'-gpu' if gpu_present else ''}]'"
    replace = f"pip uninstall -y {' '.join(installed)}; {install}"
    if len(installed) > 1:
        detail = f"{' and '.join(installed)} are installed, and have overwritten each other's files"
        return Finding("onnxruntime", "fail", detail, replace)
    if facts is None:
        return Finding("onnxruntime", "fail", "does not import", replace if installed else install)
    detail = f"{' '.join(installed)} {facts['version']}: {', '.join(facts['providers'])}".lstrip()
    if gpu_present and "onnxruntime" in installed:
        return Finding("onnxruntime", "warn", f"{detail}; it cannot use the GPU of this machine", replace)
    if not gpu_present and "onnxruntime-gpu" in installed:
        return Finding("onnxruntime", "ok", f"{detail}; works, but onnxruntime is smaller and enough without a GPU")
    return Finding("onnxruntime", "ok", detail)


def _builders() -> list[Finding]:
    """Find the builders whose engine answers; an installed client is not enough."""
    installed = [name for name in ("docker", "podman", "buildah") if shutil.which(name)]
    working = [name for name in installed if _answers([name, "info"])]
    if working:
        return [Finding("container builder", "ok", ", ".join(working))]
    if installed:
        detail = f"{', '.join(installed)} installed, but no engine answers"
        return [
            Finding("container builder", "warn", detail, "start the engine; until then only the build context is made")
        ]
    fix = "install docker, podman or buildah; until then only the build context is made"
    return [Finding("container builder", "warn", "none", fix)]


def _cluster() -> list[Finding]:
    if not shutil.which("kubectl"):
        return [Finding("kubernetes", "warn", "no kubectl", "install kubectl to inspect a cluster; deploying needs only a kubeconfig")]  # fmt: skip  # noqa: E501
    if not _answers(["kubectl", "version", "--request-timeout=5s"]):
        return [Finding("kubernetes", "warn", "no cluster answers", "check `kubectl config current-context`")]
    crds = _lines(["kubectl", "get", "crd", "-o", "name", "--request-timeout=5s"])
    crd_names = {"KServe": "inferenceservices.serving.kserve.io", "JobSet": "jobsets.jobset.x-k8s.io", "Kueue": "localqueues.kueue.x-k8s.io"}  # fmt: skip  # noqa: E501
    present = [name for name, crd in crd_names.items() if any(line.endswith(crd) for line in crds)]
    return [Finding("kubernetes", "ok", f"reachable; CRDs: {', '.join(present) or 'none of ' + ', '.join(crd_names)}")]


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"{free / _GIB:.1f} GiB free at {folder}"
    return (
        Finding("disk", "ok", detail) if free > _GIB else Finding("disk", "warn", detail, "`pipe gc` removes old runs")
    )


def shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("shared memory", "ok", f"no {folder} on this system")
    free = shutil.disk_usage(folder).free
    detail = f"{free / _GIB:.2f} GiB free at {folder}"
    if free > _GIB // 4:
        return Finding("shared memory", "ok", detail)
    return Finding("shared memory", "warn", detail, "in a container, start it with a larger --shm-size")


def _run_program(program: str) -> Any:
    """Return the JSON that a small program prints, or None when it fails."""
    lines = _lines([sys.executable, "-c", program])
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None


def _answers(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _lines(command: Sequence[str]) -> list[str]:
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=env, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
