"""Processes that are all killed between two checkpoints go on from what is left in memory."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.spec.run import Run
from train.proof import read_lines
from train.snapshot.memory import open_memory

from ..nursery import Born
from .conftest import Project, equal, journal, weights
from .launching import finish, task_of

IN_LOSS = "    def loss(self, outputs, batch):\n"
SLOW = "        import time; time.sleep(0.01)\n"
WORDS: dict[str, Any] = {"batch_size": 3, "checkpoint_every": 0, "epochs": 4}  # of 13 steps
SNAPSHOTS = {"snapshot": "memory", "snapshot_every": 5}


@pytest.fixture
def slow(project: Project) -> Project:
    project.replace(IN_LOSS, IN_LOSS + SLOW)
    return project


@pytest.fixture
def run(slow: Project) -> Iterator[Run]:
    found = slow.run("killed", **WORDS, **SNAPSHOTS)
    yield found
    shutil.rmtree(open_memory(found), ignore_errors=True)


def start_both(project: Project, run: Run) -> list[Born]:
    return [task_of(project, run, rank) for rank in (0, 1)]


def kill_after(run: Run, processes: list[Born], step: int) -> int:
    """The step they had come to, about."""
    path = run.partial("train") / "metrics.jsonl"
    end = time.monotonic() + 60
    while not path.exists() or f'"step": {step},' not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate(timeout=20)
    return int(journal(run)[-1]["step"])


def resumed_from(said: str) -> tuple[str, int]:
    found = re.search(r"resumed from the (\w+) of step (\d+) of 52", said)
    assert found is not None, said
    return found[1], int(found[2])


def test_all_processes_killed_cost_no_more_steps_than_lie_between_two_snapshots(slow: Project, run: Run) -> None:
    whole = slow.run("whole", **WORDS)
    came_to = kill_after(run, start_both(slow, run), 12)
    assert not list((run.partial("train") / "checkpoints").glob("step-*")), "none was due"
    said = finish_both(slow, run)
    what, step = resumed_from(said)
    assert what == "snapshot"
    assert step % 5 == 0
    assert came_to - step <= 2 * 5, "the newest may have been under way"
    finish_both(slow, whole)
    assert equal(weights(run), weights(whole)), "the same bits as if nobody had been killed"
    lines = read_lines(run.partial("train") / "ledger.jsonl")
    assert [line.step for line in lines] == list(range(1, 53))
    assert [line.digest for line in lines] == [
        line.digest for line in read_lines(whole.partial("train") / "ledger.jsonl")
    ]


def finish_both(project: Project, run: Run) -> str:
    processes = start_both(project, run)
    finish(*processes)
    return (project.root / f"{run.id}-0.txt").read_text()


def test_a_checkpoint_that_is_newer_comes_before_a_snapshot(slow: Project, run: Run) -> None:
    kill_after(run, start_both(slow, run), 14)
    what, step = resumed_from(finish_both(slow, run))
    assert (what, step) in (("checkpoint", 13), ("snapshot", 15))


def test_without_its_memory_training_goes_on_from_the_checkpoint(slow: Project, run: Run) -> None:
    kill_after(run, start_both(slow, run), 23)
    shutil.rmtree(open_memory(run))
    assert resumed_from(finish_both(slow, run)) == ("checkpoint", 13)


def test_after_training_nothing_is_left_in_memory(slow: Project, run: Run) -> None:
    folder = open_memory(run)
    finish_both(slow, run)
    assert not folder.exists()
