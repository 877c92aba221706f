"""The memory line of `pipe plan`: its text, the process that estimates, and the stored estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.config import parse_config
from pipeline.executors.local import LocalLauncher
from pipeline.history import Project
from pipeline.plan import Decision
from pipeline.plan_memory import CACHE_FILE, describe_memory, plan_memory

GIB = 1 << 30
FITS = {
    "bytes": int(5.1 * GIB), "weights": GIB // 2, "gradients": GIB // 2, "optimizer": GIB,
    "activations": int(3.1 * GIB), "limit": 8 * GIB,
}  # fmt: skip
STEPS = (Decision("prepare", "run", "", "a", {}), Decision("train", "run", "", "b", {}))
LINE = "memory: 5.1 GiB per process (weights 0.5, gradients 0.5, optimizer 1.0, activations 3.1)"


def config(**sections: Any) -> Any:
    return parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", **sections}, source="test")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "runs").mkdir()
    return Project(tmp_path, tmp_path / "runs")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests for estimates that the plan sent."""
    return answer_with(monkeypatch, FITS)


def answer_with(monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]) -> list[dict[str, Any]]:
    received: list[dict[str, Any]] = []

    def launch(_launcher: LocalLauncher, argv: tuple[str, ...], _log: Path, _env: object) -> int:
        received.append(json.loads(Path(argv[-1]).read_text()))
        Path(argv[-1]).write_text(json.dumps(answer))
        return 0

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    return received


def test_line_states_the_total_and_its_kinds() -> None:
    assert describe_memory(FITS) == LINE
    assert describe_memory({**FITS, "limit": 0}) == LINE, "an unknown limit"
    small = {**FITS, **dict.fromkeys(("bytes", "weights", "gradients", "optimizer", "activations"), 3 << 20)}
    assert describe_memory(small).startswith("memory: 3.0 MiB per process (weights 3.0, gradients 3.0,")


def test_line_names_the_setting_that_makes_it_fit() -> None:
    fix = {"setting": "train.accumulate=4", "bytes": int(2.3 * GIB)}
    shortage = f"{LINE}, but it can have only 4.0 GiB; to fix it: "
    assert describe_memory({**FITS, "limit": 4 * GIB, "fix": fix}) == f"{shortage}train.accumulate=4 needs 2.3 GiB"
    without = describe_memory({**FITS, "limit": 4 * GIB, "fix": None})
    assert without == f"{shortage}lower train.batch_size, or use more memory"


def test_estimate_that_fits_is_made_once_for_each_key(project: Project, requests: list[dict[str, Any]]) -> None:
    assert plan_memory(project, config(), STEPS, {}) == plan_memory(project, config(), STEPS, {}) == FITS
    assert len(requests) == 1
    plan_memory(project, config(), (STEPS[0], Decision("train", "run", "", "changed", {})), {})
    plan_memory(project, config(train={"processes": 5}), STEPS, {})
    assert len(requests) == 3
    (project.runs / CACHE_FILE).write_text("{")
    assert plan_memory(project, config(), STEPS, {}) == FITS


@pytest.mark.parametrize("answer", [{**FITS, "limit": GIB, "fix": None}, {"reason": "no"}])
def test_estimate_that_does_not_fit_is_made_again(
    answer: dict[str, Any], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = answer_with(monkeypatch, answer)
    for _ in range(2):
        assert plan_memory(project, config(), STEPS, {}) == answer
    assert len(requests) == 2
    assert not (project.runs / CACHE_FILE).exists()


def test_request_has_the_processes_of_all_machines_and_writes_nothing(
    project: Project, requests: list[dict[str, Any]]
) -> None:
    project.runs.rmdir()
    train = {"processes": 3, "nodes": 2, "rendezvous": "a:1", "device": "cpu"}
    plan_memory(project, config(train=train), STEPS, {})
    assert (requests[0]["processes"], requests[0]["local_processes"], requests[0]["limit"]) == (6, 3, None)
    assert not project.runs.exists()


def test_limit_on_a_cluster_is_the_requested_memory(project: Project, requests: list[dict[str, Any]]) -> None:
    cluster = {"executor": "kubernetes", "memory": "6Gi"}
    image = f"registry/x@sha256:{'5' * 64}"
    plan_memory(project, config(cluster=cluster, train={"processes": 3, "image": image}), STEPS, {})
    plan_memory(project, config(cluster=cluster, train={"device": "cuda", "image": image}), STEPS, {})
    assert [(request["limit"], request["device"]) for request in requests] == [(2 * GIB, "cpu"), (0, "cpu")]


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("raise ModuleNotFoundError('no torch')", 120, "ModuleNotFoundError: no torch"),
        ("import time; time.sleep(600)", 0, "the data could not be opened within 0 s"),
    ],
)
def test_process_that_fails_or_takes_too_long_is_a_reason(
    code: str, seconds: int, reason: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "estimate.py").write_text(code)
    launch, command = LocalLauncher.launch, ("python", "-m", "estimate")
    monkeypatch.setenv("PYTHONPATH", str(project.root))
    monkeypatch.setattr("pipeline.plan_memory._TIMEOUT_SECONDS", seconds)
    monkeypatch.setattr(LocalLauncher, "launch", lambda self, _, *rest: launch(self, command, *rest))
    assert plan_memory(project, config(), STEPS, {}) == {"reason": reason}
