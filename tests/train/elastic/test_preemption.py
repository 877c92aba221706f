"""Real processes that are told to end: all leave after the same step, with a checkpoint of it."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest

from pipeline.contract.errors import Evicted
from pipeline.contract.processes import TERMINATED
from pipeline.contract.run import Run
from pipeline.training.launchers import torchrun

from ...nursery import Born
from ..conftest import Project, equal, failure, journal, weights
from ..launching import await_true, finish, module, start, task_of

IN_LOSS = "    def loss(self, outputs, batch):\n"
SLOW = "        import time; time.sleep(0.01)\n"
HANG = """
        import os, pathlib
        Tiny.calls = getattr(Tiny, "calls", 0) + torch.is_grad_enabled()
        if Tiny.calls >= 60:
            pathlib.Path(f"hangs-{os.getpid()}").touch()
            time.sleep(600)
"""
LONG: dict[str, Any] = {"epochs": 24, "checkpoint_every": 0}  # 120 steps


@pytest.fixture
def slow(project: Project) -> Project:
    project.replace(IN_LOSS, IN_LOSS + SLOW)
    return project


def started(project: Project, run: Run, steps: int = 20) -> list[Born]:
    """Two processes that have made so many steps together."""
    processes = [task_of(project, run, rank) for rank in (0, 1)]
    await_step(run, steps)
    return processes


def await_step(run: Run, step: int) -> None:
    end = time.monotonic() + 60
    path = run.partial("train") / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def left_after(run: Run) -> int:
    """The step all left after, of which there is a checkpoint."""
    error = failure(run)
    assert isinstance(error, Evicted)
    assert error.passing
    found = re.search(r"there is a checkpoint of step (\d+)", str(error))
    assert found is not None
    step = int(found[1])
    assert (run.partial("train") / "checkpoints" / f"step-{step:08d}").is_dir()
    return step


def test_all_leave_after_the_step_one_was_told_in_and_the_resumed_run_repeats_none(slow: Project) -> None:
    run, whole = slow.run("told", **LONG), slow.run("whole", **LONG)
    processes = started(slow, run)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert [process.wait(timeout=30) for process in processes] == [Evicted.exit_code] * 2
    assert "told to end by SIGTERM (rank 1)" in str(failure(run))
    assert 20 < left_after(run) < 120
    finish(*[task_of(slow, run, rank) for rank in (0, 1)])
    finish(*[task_of(slow, whole, rank) for rank in (0, 1)])
    assert equal(weights(run), weights(whole))
    assert [line["step"] for line in journal(run)] == [line["step"] for line in journal(whole)]


def test_the_first_process_may_be_told_and_the_others_hear_of_it(slow: Project) -> None:
    run = slow.run(**LONG, sync="local_sgd", sync_every=8)
    processes = started(slow, run)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert [process.wait(timeout=30) for process in processes] == [Evicted.exit_code] * 2
    assert left_after(run) % 8 == 0, "all have exchanged their weights then"


def test_with_a_parameter_server_all_leave_at_the_end_of_the_epoch(slow: Project) -> None:
    run = slow.run(**LONG, sync="parameter_server")
    processes = started(slow, run, steps=10)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert [process.wait(timeout=30) for process in processes] == [Evicted.exit_code] * 2
    assert left_after(run) % 5 == 0


def test_a_process_alone_leaves_after_its_step(slow: Project) -> None:
    run = slow.run(**LONG)
    out = slow.root / "out.txt"
    process = Born(module(run)[1:], slow.root, {"PIPE_LEASH": "0"}, out, out)
    await_step(run, 20)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=30) == Evicted.exit_code
    assert left_after(run) > 20


def test_nobody_waits_for_a_process_that_does_not_answer(slow: Project) -> None:
    run = slow.run(**LONG)
    processes = started(slow, run)
    try:
        os.kill(processes[1].pid, signal.SIGSTOP)
        os.kill(processes[0].pid, signal.SIGTERM)
        said, _ = processes[0].communicate(timeout=15)  # sooner than the watchman, who looks for it after 20 s
        assert processes[0].returncode == TERMINATED
        assert "told to end by SIGTERM: ends at once, not all other processes answer" in said
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=20)


def test_who_is_told_twice_ends_at_once(slow: Project) -> None:
    """While its main thread hangs."""
    slow.replace(SLOW, SLOW + HANG)
    run = slow.run(**LONG)
    processes = started(slow, run)
    for process in processes:
        await_true((slow.root / f"hangs-{process.pid}").exists, None)
        os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.6)  # what comes sooner counts as the same signal
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        said, _ = process.communicate(timeout=20)
        assert process.returncode == TERMINATED
        assert "ends at once, told twice" in said


@pytest.mark.long
def test_torchrun_hands_the_signal_on_and_leaves_time_for_the_checkpoint(slow: Project) -> None:
    run = slow.run(**LONG)
    launcher = start(slow, torchrun(2, module(run)))
    await_step(run, 20)
    launcher.send_signal(signal.SIGTERM)
    said, _ = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert left_after(run) > 20, said
    assert "rank 0, 1" in str(failure(run))
