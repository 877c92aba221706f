"""Preemption with real processes: all end after the same step, with a checkpoint of it."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest

from pipeline.contract.run import Run
from pipeline.plan import torchrun
from pipeline.system.errors import Evicted
from pipeline.system.processes import PARENT_WATCH_VARIABLE, TERMINATED

from ...fork_server import ForkedProcess
from ..conftest import Project, equal, failure, journal, weights
from ..launching import await_true, finish, module, start, task_of

IN_LOSS = "    def loss(self, outputs, batch):\n"
SLOW = "        import time; time.sleep(0.01)\n"
HANG = """
        import os, pathlib
        Tiny.calls = getattr(Tiny, "calls", 0) + torch.is_grad_enabled()
        if Tiny.calls >= 30:
            pathlib.Path(f"hangs-{os.getpid()}").touch()
            time.sleep(600)
"""
LONG: dict[str, Any] = {"epochs": 14, "checkpoint_every": 0}  # 70 steps


@pytest.fixture
def slow(project: Project) -> Project:
    project.replace(IN_LOSS, IN_LOSS + SLOW)
    return project


def start_two(project: Project, run: Run, steps: int = 10) -> list[ForkedProcess]:
    """Start two processes, and wait until they have made so many steps together."""
    processes = [task_of(project, run, rank) for rank in (0, 1)]
    await_step(run, steps, *processes)
    return processes


def await_step(run: Run, step: int, *processes: ForkedProcess) -> None:
    end = time.monotonic() + 300
    path = run.partial("train") / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < end
        assert all(process.process.is_alive() for process in processes), "a process has ended"
        time.sleep(0.02)


def final_step(run: Run) -> int:
    """Return the step after which all processes ended; check that it has a checkpoint."""
    error = failure(run)
    assert isinstance(error, Evicted)
    assert error.passing
    found = re.search(r"there is a checkpoint of step (\d+)", str(error))
    assert found is not None
    step = int(found[1])
    assert (run.partial("train") / "checkpoints" / f"step-{step:08d}").is_dir()
    return step


def test_all_processes_end_after_the_same_step_and_none_is_repeated(slow: Project) -> None:
    run, whole = slow.run("preempted", **LONG), slow.run("whole", **LONG)
    processes = start_two(slow, run)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert [process.wait(timeout=300) for process in processes] == [Evicted.exit_code] * 2
    assert "ended by SIGTERM (rank 1)" in str(failure(run))
    assert 10 < final_step(run) < 70
    finish(*[task_of(slow, run, rank) for rank in (0, 1)])
    finish(*[task_of(slow, whole, rank) for rank in (0, 1)])
    assert equal(weights(run), weights(whole))
    assert [line["step"] for line in journal(run)] == [line["step"] for line in journal(whole)]


@pytest.mark.long
def test_local_sgd_ends_at_its_next_synchronization(slow: Project) -> None:
    run = slow.run(**LONG, strategy="local_sgd", sync_every=8)
    processes = start_two(slow, run)
    os.kill(processes[0].pid, signal.SIGTERM)
    assert [process.wait(timeout=300) for process in processes] == [Evicted.exit_code] * 2
    assert final_step(run) % 8 == 0, "all have exchanged their weights then"


@pytest.mark.long
def test_parameter_server_training_ends_with_the_epoch(slow: Project) -> None:
    run = slow.run(**LONG, strategy="parameter_server")
    processes = start_two(slow, run, steps=10)
    os.kill(processes[1].pid, signal.SIGTERM)
    assert [process.wait(timeout=300) for process in processes] == [Evicted.exit_code] * 2
    assert final_step(run) % 5 == 0


def test_a_single_process_ends_after_its_step(slow: Project) -> None:
    run = slow.run(**LONG)
    out = slow.root / "out.txt"
    process = ForkedProcess(module(run)[1:], slow.root, {PARENT_WATCH_VARIABLE: "0"}, out, out)
    await_step(run, 10, process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=300) == Evicted.exit_code
    assert final_step(run) > 10


@pytest.mark.long
def test_stopped_process_does_not_block_preemption(slow: Project) -> None:
    run = slow.run(**LONG)
    processes = start_two(slow, run)
    try:
        os.kill(processes[1].pid, signal.SIGSTOP)
        os.kill(processes[0].pid, signal.SIGTERM)
        output, _ = processes[0].communicate(timeout=300)
        assert processes[0].returncode == TERMINATED
        assert "SIGTERM: ending at once, not all other processes answer" in output
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=300)


@pytest.mark.long
def test_a_second_signal_ends_a_process_at_once(slow: Project) -> None:
    """While its main thread hangs."""
    slow.replace(SLOW, SLOW + HANG)
    run = slow.run(**LONG)
    processes = start_two(slow, run)
    for process in processes:
        await_true((slow.root / f"hangs-{process.pid}").exists, None)
        os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.6)  # a signal before that counts as the same one
    for process in processes:
        os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == TERMINATED
        assert "ending at once, second SIGTERM" in output


@pytest.mark.long
def test_torchrun_passes_the_signal_on_and_waits_for_the_checkpoint(slow: Project) -> None:
    run = slow.run(**LONG)
    launcher = start(slow, torchrun(2, module(run)))
    await_step(run, 10)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    assert final_step(run) > 10, output
    assert "rank 0, 1" in str(failure(run))
