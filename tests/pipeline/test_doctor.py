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
from pipeline.doctor import check_runtime, check_torch, disk, shared_memory
from pipeline.system.sources import SOURCE_ROOT

CPU_TORCH: Mapping[str, Any] = {
    "version": "2.13.0", "built_for": None, "cuda": False, "gpus": [], "cudnn": None, "nccl": None, "gloo": True,
}  # fmt: skip
GPU_TORCH = {**CPU_TORCH, "built_for": "13.0", "cuda": True, "gpus": ["H200"], "cudnn": 91000, "nccl": "2.29"}


def states(found: Mapping[str, Any], gpu_present: bool) -> dict[str, str]:
    return {finding.what: finding.state for finding in check_torch(found, gpu_present)}


def test_a_machine_without_a_gpu_trains_on_its_cpu() -> None:
    assert states(CPU_TORCH, gpu_present=False) == {"torch": "ok", "gpu": "warn"}


def test_a_gpu_that_torch_cannot_use_is_a_failure_with_its_reason() -> None:
    finding = check_torch(CPU_TORCH, gpu_present=True)[1]
    assert (finding.state, finding.what) == ("fail", "gpu")
    assert "torch (built without CUDA) cannot use it" in finding.detail
    assert "built for CUDA 13.0" in check_torch({**CPU_TORCH, "built_for": "13.0"}, gpu_present=True)[1].detail


def test_a_gpu_is_reported_with_its_libraries() -> None:
    finding = check_torch(GPU_TORCH, gpu_present=True)[1]
    assert (finding.state, finding.detail) == ("ok", "H200; CUDA 13.0, cuDNN 91000, NCCL 2.29")


def test_processes_cannot_meet_on_a_cpu_without_gloo() -> None:
    assert states({**CPU_TORCH, "gloo": False}, gpu_present=False)["gloo"] == "fail"


CPU_RUNTIME = {"version": "1.31.1", "providers": ["CPUExecutionProvider"]}
GPU_RUNTIME = {"version": "1.31.1", "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


@pytest.mark.parametrize(
    ("facts", "package", "gpu_present"),
    [(CPU_RUNTIME, "onnxruntime", False), (GPU_RUNTIME, "onnxruntime-gpu", True)],
)
def test_the_runtime_that_fits_is_reported_by_name(facts: Mapping[str, Any], package: str, gpu_present: bool) -> None:
    finding = check_runtime(facts, [package], gpu_present)
    assert (finding.state, finding.fix) == ("ok", "")
    assert finding.detail == f"{package} 1.31.1: {', '.join(facts['providers'])}"


def test_the_runtime_for_cpus_on_a_machine_with_a_gpu_is_a_warning() -> None:
    finding = check_runtime(CPU_RUNTIME, ["onnxruntime"], gpu_present=True)
    assert (finding.state, "cannot use the GPU" in finding.detail) == ("warn", True)
    assert finding.fix == "pip uninstall -y onnxruntime; pip install 'pipe-road[serve-gpu]'"


def test_the_runtime_for_gpus_on_a_machine_without_one_works() -> None:
    finding = check_runtime(GPU_RUNTIME, ["onnxruntime-gpu"], gpu_present=False)
    assert (finding.state, finding.fix) == ("ok", "")
    assert "works, but onnxruntime is smaller" in finding.detail


@pytest.mark.parametrize(("gpu_present", "extra"), [(False, "serve"), (True, "serve-gpu")])
def test_both_runtimes_are_a_failure_that_only_a_new_installation_fixes(gpu_present: bool, extra: str) -> None:
    finding = check_runtime(GPU_RUNTIME, ["onnxruntime", "onnxruntime-gpu"], gpu_present)
    assert (finding.state, "overwritten" in finding.detail) == ("fail", True)
    assert finding.fix == f"pip uninstall -y onnxruntime onnxruntime-gpu; pip install 'pipe-road[{extra}]'"


@pytest.mark.parametrize(
    ("installed", "fix"),
    [
        ([], "pip install 'pipe-road[serve]'"),
        (["onnxruntime"], "pip uninstall -y onnxruntime; pip install 'pipe-road[serve]'"),  # some files are missing
    ],
)
def test_a_runtime_that_does_not_import_is_a_failure(installed: list[str], fix: str) -> None:
    finding = check_runtime(None, installed, gpu_present=False)
    assert (finding.state, finding.detail, finding.fix) == ("fail", "does not import", fix)


@pytest.mark.parametrize(("free_gib", "state"), [(0.5, "warn"), (20, "ok")])
def test_little_disk_space_is_a_warning_with_its_fix(
    free_gib: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs_result  # only `free` is read
    monkeypatch.setattr("shutil.disk_usage", lambda _: type(usage.__name__, (), {"free": int(free_gib * (1 << 30))}))
    assert disk(tmp_path).state == state
    assert ("pipe gc" in disk(tmp_path).fix) == (state == "warn")


def test_a_system_without_shared_memory_as_a_folder_is_fine(tmp_path: Path) -> None:
    assert shared_memory(tmp_path / "none").state == "ok"


def test_a_builder_counts_when_its_engine_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_package_that_does_not_import_is_no_answer() -> None:
    assert doctor._run_program("import no_such_module_here") is None
    assert doctor._run_program("print('noise'); print('[1, 2]')") == [1, 2]


def test_a_command_that_is_not_there_does_not_answer() -> None:
    assert not doctor._answers(["no-such-command-here"])


def test_doctor_reports_every_check_with_a_fix_for_each_problem(tmp_path: Path) -> None:
    """As it is typed; every problem found comes with a fix, and only a failure makes the exit status."""
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
