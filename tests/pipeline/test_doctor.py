from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline import doctor
from pipeline.doctor import check_runtime, check_torch, disk
from pipeline.system.sources import SOURCE_ROOT

CPU_TORCH: Mapping[str, Any] = {
    "version": "2.13.0", "built_for": None, "cuda": False, "gpus": [], "cudnn": None, "nccl": None, "gloo": True,
}  # fmt: skip
GPU_TORCH = {**CPU_TORCH, "built_for": "13.0", "cuda": True, "gpus": ["H200"], "cudnn": 91000, "nccl": "2.29"}


@pytest.mark.parametrize(
    ("facts", "gpu_present", "what", "state", "detail"),
    [
        (CPU_TORCH, False, "torch", "ok", ""),
        (CPU_TORCH, False, "gpu", "warn", ""),
        (CPU_TORCH, True, "gpu", "fail", "torch (built without CUDA) cannot use it"),
        ({**CPU_TORCH, "built_for": "13.0"}, True, "gpu", "fail", "built for CUDA 13.0"),
        (GPU_TORCH, True, "gpu", "ok", "H200; CUDA 13.0, cuDNN 91000, NCCL 2.29"),
        ({**CPU_TORCH, "gloo": False}, False, "gloo", "fail", ""),  # needed by training processes
    ],
)
def test_devices_and_backends_of_torch_are_reported(
    facts: Mapping[str, Any], gpu_present: bool, what: str, state: str, detail: str
) -> None:
    (finding,) = [finding for finding in check_torch(facts, gpu_present) if finding.what == what]
    assert finding.state == state
    assert detail in finding.detail


CPU_RUNTIME = {"version": "1.31.1", "providers": ["CPUExecutionProvider"]}
GPU_RUNTIME = {"version": "1.31.1", "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


CPU, GPU, BOTH = ["onnxruntime"], ["onnxruntime-gpu"], ["onnxruntime", "onnxruntime-gpu"]
REMOVE = "pip uninstall -y onnxruntime"


@pytest.mark.parametrize(
    ("facts", "installed", "gpu_present", "state", "detail", "fix"),
    [
        (CPU_RUNTIME, CPU, False, "ok", "onnxruntime 1.31.1: CPUExecutionProvider", ""),
        (GPU_RUNTIME, GPU, True, "ok", "onnxruntime-gpu 1.31.1: CUDAExecutionProvider, CPUExecutionProvider", ""),
        (CPU_RUNTIME, CPU, True, "warn", "cannot use the GPU", f"{REMOVE}; pip install 'pipe-road[serve-gpu]'"),
        (GPU_RUNTIME, GPU, False, "ok", "works, but onnxruntime is smaller", ""),
        (GPU_RUNTIME, BOTH, False, "fail", "overwritten", f"{REMOVE} onnxruntime-gpu; pip install 'pipe-road[serve]'"),
        (
            GPU_RUNTIME, BOTH, True, "fail", "overwritten",
            f"{REMOVE} onnxruntime-gpu; pip install 'pipe-road[serve-gpu]'",
        ),
        (None, [], False, "fail", "does not import", "pip install 'pipe-road[serve]'"),
        (None, CPU, False, "fail", "does not import", f"{REMOVE}; pip install 'pipe-road[serve]'"),  # files are missing
    ],
)  # fmt: skip
def test_unsuitable_onnxruntime_is_reported_with_a_fix(
    facts: Mapping[str, Any] | None, installed: list[str], gpu_present: bool, state: str, detail: str, fix: str
) -> None:
    finding = check_runtime(facts, installed, gpu_present)
    assert (finding.state, finding.fix) == (state, fix)
    assert detail in finding.detail


@pytest.mark.parametrize(("free_gib", "state"), [(0.5, "warn"), (20, "ok")])
def test_little_disk_space_is_a_warning_with_its_fix(
    free_gib: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs_result  # only `free` is read
    monkeypatch.setattr("shutil.disk_usage", lambda _: type(usage.__name__, (), {"free": int(free_gib * (1 << 30))}))
    assert disk(tmp_path).state == state
    assert ("pipe gc" in disk(tmp_path).fix) == (state == "warn")


def test_builder_is_ok_only_if_its_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor._builders()[0].detail == "none"
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\nexit 1\n")
    client.chmod(0o755)
    assert doctor._builders()[0].detail == "docker installed, but no engine answers"
    client.write_text("#!/bin/sh\nexit 0\n")
    assert (doctor._builders()[0].state, doctor._builders()[0].detail) == ("ok", "docker")


def test_a_missing_kubectl_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(finding.state, finding.detail) for finding in doctor._cluster()] == [("warn", "no kubectl")]


def test_failed_import_returns_none() -> None:
    assert doctor._run_program("import no_such_module_here") is None
    assert doctor._run_program("print('noise'); print('[1, 2]')") == [1, 2]


def test_doctor_reports_every_check_with_a_fix_for_each_problem(tmp_path: Path) -> None:
    """The exit status is 1 only if a check failed."""
    command = [sys.executable, "-m", "pipeline", "-C", str(tmp_path), "doctor", "-o", "json"]
    done = subprocess.run(command, cwd=SOURCE_ROOT, capture_output=True, text=True, timeout=100, check=False)
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "torch", "onnxruntime", "container builder", "kubernetes", "disk"} <= findings.keys()
    assert findings["torch"]["state"] == findings["onnxruntime"]["state"] == "ok"
    assert [what for what, finding in findings.items() if finding["state"] != "ok" and not finding["fix"]] == []
    assert done.returncode == any(finding["state"] == "fail" for finding in findings.values())


def test_launchers_are_reported_when_they_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.launchers()[0].detail.startswith("torchrun; train.compress helps on slow networks")
    (tmp_path / "mpirun").touch(mode=0o755)
    assert doctor.launchers()[0].detail.startswith("torchrun, mpirun; ")
