"""A full disk, wherever it fills: what the error advises works once there is space again."""

from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path

import pytest

from pipeline.contract.run import STEPS, Run, RunFile, StepRecord, step_main
from pipeline.history import load_history, publish_step, write_run
from pipeline.plan import STEP_KINDS

from .conftest import Pipe

UNTIL_PACKAGE = STEPS[: STEPS.index("package") + 1]


class Disk:
    """Is full at one place; steps are replaced by functions that only write the files that others read."""

    def __init__(self) -> None:
        self.full_at = ""
        self.reports: list[str] = []

    def write(self, place: str) -> None:
        if place == self.full_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def execute(self, _executor: object, run: Run, record: StepRecord, _tick: object) -> int:
        def work(run: Run, _root: Path) -> None:
            for path in (Path(path) for kind in STEP_KINDS.values() for path in kind.inputs):
                if path.parts[0] == record.step:
                    target = run.partial(record.step).joinpath(*path.parts[1:])
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text("{}")
            self.write(f"{record.step} works")

        return step_main(record.step, work, [str(run.path)])

    def publish(self, run: Run, step: str) -> object:
        self.write(f"{step} ends")
        return publish_step(run, step)

    def write_run(self, run: Run, body: RunFile) -> None:
        self.write("run.json")
        write_run(run, body)

    def write_report(self, run: Run, _path: Path) -> None:
        self.write("report")
        self.reports.append(run.id)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    for name, replacement in (
        ("executors.executor.LocalExecutor.execute", lambda *arguments: disk.execute(*arguments)),
        ("run.start_fork_server", lambda *_: contextlib.nullcontext({})),
        ("run.publish_step", disk.publish),
        ("history.write_run", disk.write_run),
        ("report.page.write_report", disk.write_report),
        ("contract.run.watch_parent", lambda: None),
        ("cli.run.emit_run", lambda *_: None),  # there is no verdict
    ):
        monkeypatch.setattr(f"pipeline.{name}", replacement)
    return disk


@pytest.mark.parametrize("place", [*(f"{step} {how}" for step in UNTIL_PACKAGE for how in ("works", "ends")), "report"])
def test_advice_after_a_full_disk_completes_the_run(pipe: Pipe, starter: Path, disk: Disk, place: str) -> None:
    disk.full_at = place
    failed = pipe("run", "--until", "package", expect=2).stderr
    advice = re.search(r"error: .*disk full.*; free some space, then `pipe (run --resume \S+)`", failed)
    assert advice, failed
    assert "pipe run all" not in failed, "one advice"
    disk.full_at = ""
    pipe(*advice[1].split())
    ((run, body),) = load_history(starter / "runs")
    assert {name: body.steps[name].status for name in UNTIL_PACKAGE} == dict.fromkeys(UNTIL_PACKAGE, "done")
    assert disk.reports[-1] == run.id


def test_a_disk_that_is_full_before_a_run_exists_leaves_no_run(pipe: Pipe, starter: Path, disk: Disk) -> None:
    disk.full_at = "run.json"
    assert "; free some space, then repeat this command" in pipe("run", "check", expect=2).stderr
    assert [path for path in (starter / "runs").iterdir() if path.is_dir()] == []
    disk.full_at = ""
    pipe("run", "check")
