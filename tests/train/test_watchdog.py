"""Real processes of which one hangs: the others report which one, where and since when, and all end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from pipeline.contract.restarts import read_events
from pipeline.contract.run import Run
from pipeline.system.errors import Stalled
from pipeline.system.processes import Rank
from train.checkpoint.storage import LocalStorage
from train.hang_report import Activity, Hang, ProcessReport, describe_hang
from train.process_group import ProcessGroup
from train.watchdog import HangReports, Watchdog, run_watchdog

from ..fork_server import ForkedProcess
from .conftest import Project, failure, journal
from .launching import start, task_of

HUNG = ProcessReport(
    1, "b", 42, 0.0, 9, 4, "data", Activity.USER_CODE, "task.py, line 7, data", 30.04, "", "its stacks\n"
)
WAITS = replace(HUNG, rank=0, host="a", activity=Activity.WAITING, exchanges="gloo:all_reduce, no. 3, of [2] Float")
FOUND = Hang([WAITS, HUNG], [HUNG])


def test_hang_report_has_a_summary_and_a_section_per_process(tmp_path: Path) -> None:
    path = HangReports(tmp_path / "stalls").write(FOUND, lambda one: f"more of {one.rank}")
    first, waits, hung = path.read_text().split("== ")
    assert first.startswith("rank 1 on b (process 42) has made no progress for 30 s from step 4, data")
    assert waits.splitlines()[0] == "rank 0 on a (process 42), still for 30.0 s"
    assert "unfinished: gloo:all_reduce, no. 3, of [2] Float" in waits
    assert hung.splitlines() == [
        "rank 1 on b (process 42), still for 30.0 s  <- waited for",
        "at step 4, data",
        "place: task.py, line 7, data",
        "more of 1",
        "its stacks",
        "",
    ]


def test_each_launch_leaves_one_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.link")  # which mounts of object storage do not have
    first, second = HangReports(tmp_path), HangReports(tmp_path)
    assert first.write(FOUND, lambda _: "seen by the first") == tmp_path / "1.txt"
    assert second.write(FOUND, lambda _: "seen by the second") == tmp_path / "1.txt"
    assert "seen by the first" in (tmp_path / "1.txt").read_text()
    assert HangReports(tmp_path).write(FOUND, lambda _: "") == tmp_path / "2.txt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.txt", "2.txt"]


IN_LOSS = "    def loss(self, outputs, batch):\n"
SECOND_AT_ITS_FOURTH_LOSS = """
        import os
        self.losses = getattr(self, "losses", 0) + 1
        if os.environ["SLURM_PROCID"] == "1" and self.losses == 4:
            {hang}
"""
ASLEEP = "import time; time.sleep(600)"
STOPPED = "os.kill(os.getpid(), 19)"
FROZEN = "import ctypes; ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock"


def start_both(project: Project, run: Run) -> list[ForkedProcess]:
    return [task_of(project, run, rank) for rank in (0, 1)]


def end(processes: list[ForkedProcess]) -> None:
    for process in processes:
        process.kill()
        process.communicate(timeout=300)


@pytest.mark.parametrize(
    ("hang", "message"),
    [
        pytest.param(ASLEEP, "has made no progress for", marks=pytest.mark.long),
        pytest.param(STOPPED, "does not answer: it is stopped (SIGSTOP)", marks=pytest.mark.long),
        (FROZEN, "does not answer: its interpreter is blocked in native code"),
    ],
    ids=["asleep", "stopped", "frozen"],
)
def test_a_hung_process_is_named_and_ends_training(project: Project, hang: str, message: str) -> None:
    project.replace(IN_LOSS, IN_LOSS + SECOND_AT_ITS_FOURTH_LOSS.format(hang=hang))
    run = project.run(timeout_seconds=3)
    processes = start_both(project, run)
    try:
        output, _ = processes[0].communicate(timeout=300)
        assert processes[0].returncode == Stalled.exit_code, output
        assert isinstance(failure(run), Stalled)
        assert failure(run).passing, "training may start again by itself"
        text = str(failure(run))
        assert text.startswith(f"rank 1 on {os.uname().nodename} (process {processes[1].pid}) {message}")
        # Two losses belong to the warm-up and the check of parameters; a stopped process is noticed a little earlier.
        assert re.search("step [12], forward and backward", text)
        assert "Waiting for it: rank 0 at step 2, forward and backward" in text
        assert "gloo:" in text, "the exchange that waits"
        assert_hang_report(run, hang)
        if hang == ASLEEP:
            assert "task.py, line" in text
            assert processes[1].wait(timeout=300) == Stalled.exit_code, "it can still end itself"
    finally:
        end(processes)


def assert_hang_report(run: Run, hang: str) -> None:
    """Check that the report has the stack of the hanging process, if it is readable, and of the waiting one."""
    text = (run.path / "logs" / "stalls" / "1.txt").read_text()
    assert "logs/stalls/1.txt of the run" in str(failure(run))
    assert [path.name for path in (run.path / "logs" / "stalls").iterdir()] == ["1.txt"]
    waiting, hanging = text.split("== rank ")[1:]
    still = re.search(r"still for ([\d.]+) s", waiting)
    assert still is not None
    assert 0 < float(still[1]) < 100, "by its own clock"
    assert "unfinished: gloo:" in waiting
    assert 'train/trainer.py", line' in waiting
    assert "still for" in hanging and "<- waited for" in hanging
    if hang == STOPPED:
        assert "kernel: T (stopped)" in hanging
    else:
        assert f'{run.path.parent.parent / "task.py"}", line' in hanging


def test_a_process_that_hangs_in_validation_is_named(project: Project) -> None:
    hang = f'if __import__("os").environ["SLURM_PROCID"] == "0" and not torch.is_grad_enabled(): {ASLEEP}'
    project.replace(IN_LOSS, f"{IN_LOSS}        {hang}\n")
    run = project.run(timeout_seconds=3)
    processes = start_both(project, run)
    try:
        for process in processes:
            assert process.wait(timeout=300) == Stalled.exit_code
    finally:
        end(processes)
    assert str(failure(run)).startswith("rank 0 on ")
    assert "from step 5, validation (task.py, line" in str(failure(run))


def test_single_process_starts_no_watchdog(tmp_path: Path) -> None:
    before = threading.active_count()
    with run_watchdog(ProcessGroup(Rank(), torch.device("cpu")), Run(tmp_path), tmp_path, 1):
        assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_never_reported_is_named(tmp_path: Path) -> None:
    watchdog = Watchdog(ProcessGroup(Rank(0, 0, 2), torch.device("cpu")), tmp_path, tmp_path, timeout_seconds=0.5)
    found = None
    while found is None:
        time.sleep(0.02)
        found = watchdog.check()
    assert describe_hang(found).startswith("rank 1 on an unknown host (process 0) does not answer: stopped, stuck in")
    assert json.loads(watchdog.path(0).read_text())["still_seconds"] >= 0.5
    watchdog.remove_files()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("state", "blamed"), [("started", [1]), ("scheduled", [])])
def test_host_waiting_for_its_gpu_counts_as_in_the_collective(
    state: str, blamed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host waits in `.item()` while its GPU is in a collective; the other process sleeps in the task's code."""
    names = {"profiling_name": "nccl:all_reduce", "process_group": ["0", "default_pg"]}
    entry = {**names, "is_p2p": False, "collective_seq_id": 7, "retired": False}
    dump = json.dumps({"entries": [{**entry, "state": state, "input_sizes": [], "input_dtypes": []}]})
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda _collectives, _active: dump, raising=False)
    group = ProcessGroup(Rank(0, 0, 2), torch.device("cpu"))
    watchdog = Watchdog(group, tmp_path, Path(__file__).parent, timeout_seconds=0.5)
    group.heartbeat.at(HUNG.step - 1, HUNG.phase)
    found, own = None, {}
    for beat in itertools.count():
        watchdog.path(1).write_text(json.dumps(asdict(replace(HUNG, beat=beat))))
        found = watchdog.check()
        own = json.loads(watchdog.path(0).read_text())
        if own["still_seconds"] > 0.5:
            break
        time.sleep(0.02)
    assert [report.rank for report in (found.culprits if found else ())] == blamed
    assert "nccl:all_reduce, no. 7" in own["exchanges"]
    watchdog.remove_files()


def test_progress_within_a_phase_is_not_a_hang(tmp_path: Path) -> None:
    group = ProcessGroup(Rank(0, 0, 2), torch.device("cpu"))
    watchdog = Watchdog(group, tmp_path, tmp_path, timeout_seconds=0.5)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        group.heartbeat.beat()
        assert watchdog.check() is None
        time.sleep(0.02)
    watchdog.remove_files()


def test_a_blocked_checkpoint_write_is_reported_as_the_place(tmp_path: Path) -> None:
    """Its main thread only waits for the one that writes."""
    folder, group = LocalStorage(tmp_path), ProcessGroup(Rank(0, 0, 2), torch.device("cpu"))
    folder.begin("token")
    (tmp_path / ".step-00000004.token").mkdir()
    pipe = tmp_path / ".step-00000004.token" / "0.safetensors"
    os.mkfifo(pipe)
    watchdog = Watchdog(group, tmp_path, tmp_path / "user", timeout_seconds=30)

    def write() -> None:
        with contextlib.suppress(OSError):  # a pipe cannot be synced to a disk
            folder.write(4, pipe.name, memoryview(b"state"))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        group.heartbeat.at(3, "checkpoint")
        message: dict[str, Any] = {"place": ""}
        while not message["place"].startswith("storage.py"):  # until the thread is there
            watchdog.publish()
            message = json.loads(watchdog.path(0).read_text())
        assert message["activity"] == Activity.PIPE_CODE
        group.heartbeat.at(4, "data")
        watchdog.publish()
        assert json.loads(watchdog.path(0).read_text())["place"].startswith("watchdog.py"), "it continues"
    finally:
        descriptor = os.open(pipe, os.O_RDONLY)
        writing.join(timeout=300)
        os.close(descriptor)
    watchdog.remove_files()


ONCE = """
        import os, pathlib
        self.losses = getattr(self, "losses", 0) + 1
        if os.environ["RANK"] == "1" and self.losses == 14 and not os.path.exists("hung"):
            pathlib.Path("hung").touch()
            os.kill(os.getpid(), 19)
"""


@pytest.mark.long
def test_training_restarts_after_a_stopped_process(project: Project) -> None:
    """The watchdog of the other one ends it, and the agent kills the stopped one."""
    project.replace(IN_LOSS, IN_LOSS + ONCE)
    run = project.run(timeout_seconds=3)  # 15 steps; a checkpoint after every fifth, the stop is in the tenth or so
    agent = start(
        project, ("python", "-m", "train.elastic.agent", str(run.path), "--processes", "2", "--restarts", "3")
    )
    output, _ = agent.communicate(timeout=120)
    assert agent.returncode == 0, output
    assert (run.path / "logs" / "stalls" / "1.txt").exists()
    assert len([event for event in read_events(run.path) if event.event == "step"]) == 2
    assert journal(run)[-1]["step"] == 15
