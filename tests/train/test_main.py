"""Processes that are all killed between two checkpoints go on from what is left in memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.contract.data import Samples
from pipeline.contract.run import Run
from pipeline.system.files import write_json
from train.__main__ import _longest_first, describe_samples, describe_summary, first_disagreement
from train.batch_order import write_order
from train.ledger import read_lines

from ..fork_server import ForkedProcess
from .conftest import Project, equal, failure, journal, weights
from .launching import finish, task_of


class Items:
    """A dataset whose items are random at each access."""

    def __init__(self, widths: list[int]) -> None:
        self._widths = widths

    def __len__(self) -> int:
        return len(self._widths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(self._widths[index])}


def columns(**changes: Any) -> dict[str, str]:
    values: dict[str, Any] = {"x": np.zeros((100, 3), np.float32), "y": np.arange(100), **changes}
    return describe_samples(Samples("train", {name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "received"),
    [
        (
            {"x": np.zeros((100, 4), np.float32)},
            "column x is (3,) torch.float32 on rank 0, 2 and (4,) torch.float32",
        ),
        ({"x": np.zeros((100, 3))}, "column x is (3,) torch.float32 on rank 0, 2 and (3,) torch.float64 on rank 1"),
        ({"y": None}, "column y is () torch.int64 on rank 0, 2 and missing on rank 1"),
        ({"x": np.zeros((99, 3), np.float32), "y": np.arange(99)}, "its length is 100 on rank 0, 2 and 99 on rank 1"),
        ({"y": np.arange(100)[::-1].copy()}, "the content of column y is "),
    ],
)
def test_what_differs_is_named_with_the_ranks(changes: dict[str, Any], received: str) -> None:
    found = first_disagreement([columns(), columns(**changes), columns()])
    assert found.startswith(received)


def test_equal_splits_agree() -> None:
    assert first_disagreement([columns(), columns(), columns()]) == ""
    assert first_disagreement([columns()]) == ""


def test_random_samples_are_compared_by_shape() -> None:
    found = [describe_samples(Samples("train", Items([3, 3, 3]))) for _ in range(2)]
    assert first_disagreement(found) == ""


def test_the_last_sample_is_checked_too() -> None:
    found = [describe_samples(Samples("train", Items(widths))) for widths in ([3, 3, 3], [3, 3, 4])]
    assert "(3,) torch.float32 at first, (4,) torch.float32 at last on rank 1" in first_disagreement(found)


def test_half_precision_is_compared_as_any_other() -> None:
    assert first_disagreement([columns(x=torch.ones(100, dtype=torch.bfloat16))] * 2) == ""


def test_a_split_that_differs_between_processes_is_an_error(project: Project) -> None:
    run = project.run()
    project.replace("self.counts[split], 3", 'self.counts[split] - int(__import__("os").environ["RANK"]), 3')
    assert project.train(run, processes=2).returncode != 0
    assert str(failure(run)).startswith(
        "data('train') differs between processes: its length is 37 on rank 0 and 36 on rank 1; to fix it"
    )
    assert not (run.partial("train") / "checkpoints").exists()


def test_a_split_smaller_than_the_world_is_refused(project: Project) -> None:
    project.replace('"validation": 11', '"validation": 1')
    run = project.run()
    assert project.train(run, processes=2).returncode != 0
    assert "data('validation'): 1 samples for 2 processes; to fix it, lower train.processes" in str(failure(run))


IN_LOSS = "    def loss(self, outputs, batch):\n"
# No process gets far beyond the step at which all are killed, however late the test sees it.
SLOW = """\
        import pathlib, time
        time.sleep(0.01)
        while any(there in pathlib.Path(path).read_text() for path, there in read_holds()):
            time.sleep(0.01)
"""
HOLDS = """
def read_holds():
    import json, pathlib
    hold = pathlib.Path("hold.json")
    return [json.loads(hold.read_text())] if hold.exists() else []
"""
WORDS: dict[str, Any] = {"batch_size": 3, "checkpoint_every": 5, "epochs": 4}  # of 13 steps


@pytest.fixture
def slow(project: Project) -> Project:
    project.replace(IN_LOSS, IN_LOSS + SLOW)
    project.replace("class Tiny:", HOLDS + "\n\nclass Tiny:")
    return project


def start_both(project: Project, run: Run) -> list[ForkedProcess]:
    return [task_of(project, run, rank) for rank in (0, 1)]


def killed_after(project: Project, run: Run, step: int, checkpoint: int) -> int:
    """The step they had come to, about; the checkpoint is one that was complete by then."""
    journaled, hold = run.partial("train") / "metrics.jsonl", project.root / "hold.json"
    journaled.parent.mkdir(parents=True, exist_ok=True)
    journaled.touch()
    hold.write_text(json.dumps([str(journaled), f'"step": {step},']))
    processes = start_both(project, run)
    wait_until(lambda: f'"step": {step},' in journaled.read_text())
    wait_until((run.partial("train") / "checkpoints" / f"step-{checkpoint:08d}").exists)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate(timeout=300)
    hold.unlink()
    return int(journal(run)[-1]["step"])


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def resumed_from(output: str) -> int:
    found = re.search(r"resumed from the checkpoint of step (\d+) of 52", output)
    assert found is not None, output
    return int(found[1])


@pytest.mark.long
def test_a_kill_costs_at_most_the_steps_since_the_checkpoint(slow: Project) -> None:
    run, whole = (slow.run(name, **WORDS) for name in ("killed", "whole"))
    came_to = killed_after(slow, run, 12, checkpoint=5)
    step = resumed_from(finish_both(slow, run))
    assert step % 5 == 0
    assert came_to - step <= 2 * 5, "the newest may have been under way"
    finish_both(slow, whole)
    assert equal(weights(run), weights(whole)), "the same bits as without kills"
    lines = read_lines(run.partial("train") / "ledger.jsonl")
    assert [line.step for line in lines] == list(range(1, 53))
    assert [line.digest for line in lines] == [
        line.digest for line in read_lines(whole.partial("train") / "ledger.jsonl")
    ]


def finish_both(project: Project, run: Run) -> str:
    processes = start_both(project, run)
    finish(*processes)
    return (project.root / f"{run.id}-0.txt").read_text()


SUMMARY = {"steps": 40, "batch_size": 8, "samples_per_second": 1234.5, "best_step": 30}


def test_training_ends_with_a_line_for_people() -> None:
    assert describe_summary(SUMMARY) == "40 steps in batches of 8, 1,234 samples/s; best at step 30"


def test_steps_that_were_skipped_are_reported() -> None:
    received = describe_summary({**SUMMARY, "overflow_steps": 2, "loss_scale": 16384.0})
    assert received.endswith("; best at step 30; 2 steps skipped for overflow, loss scale 16384")
    assert "; 1 step skipped" in describe_summary({**SUMMARY, "overflow_steps": 1, "loss_scale": 16384.0})


def test_a_stream_in_another_order_in_each_process_is_noticed() -> None:
    class Stream:
        def __init__(self, order: list[int]) -> None:
            self.order = order

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return ({"index": i, "noise": torch.rand(2)} for i in self.order)

    same, other = (describe_samples(Samples("train", Stream(order))) for order in ([0, 1, 2], [0, 2, 1]))
    assert first_disagreement([same, describe_samples(Samples("train", Stream([0, 1, 2])))]) == ""
    assert first_disagreement([same, other]).startswith("the content of column index is ")


def test_memory_is_measured_with_the_longest_samples(tmp_path: Path) -> None:
    samples = Samples("train", Items([2, 5, 3]))
    report = {"splits": {"train": {"samples": 3}}}
    write_json(tmp_path / "data.json", report)
    assert _longest_first(samples, tmp_path) is samples
    write_json(tmp_path / "data.json", {**report, "order": write_order("lengths", np.array([2, 5, 3]), tmp_path)})
    assert _longest_first(samples, tmp_path).batch([0])["x"].shape == (1, 5)
