"""Splits that must be the same in every process, and the line for people at the end of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.contract.data import Samples
from pipeline.system.files import write_json
from train.__main__ import _longest_first, describe_samples, describe_summary, first_disagreement
from train.batch_order import write_order

from .conftest import Project, failure


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
        ({"x": np.zeros((100, 4), np.float32)}, "column x is (3,) torch.float32 on rank 0, 2 and (4,) torch.float32"),
        ({"x": np.zeros((100, 3))}, "column x is (3,) torch.float32 on rank 0, 2 and (3,) torch.float64 on rank 1"),
        ({"y": None}, "column y is () torch.int64 on rank 0, 2 and missing on rank 1"),
        ({"x": np.zeros((99, 3), np.float32), "y": np.arange(99)}, "its length is 100 on rank 0, 2 and 99 on rank 1"),
        ({"y": np.arange(100)[::-1].copy()}, "the content of column y is "),
    ],
)
def test_differences_are_named_with_their_ranks(changes: dict[str, Any], received: str) -> None:
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


SUMMARY = {"steps": 40, "batch_size": 8, "samples_per_second": 1234.5, "best_step": 30}


def test_summary_of_training_is_one_line() -> None:
    assert describe_summary(SUMMARY) == "40 steps in batches of 8, 1,234 samples/s; best at step 30"


def test_steps_that_were_skipped_are_reported() -> None:
    received = describe_summary({**SUMMARY, "overflow_steps": 2, "loss_scale": 16384.0})
    assert received.endswith("; best at step 30; 2 steps skipped for overflow, loss scale 16,384")
    assert "; 1 step skipped" in describe_summary({**SUMMARY, "overflow_steps": 1, "loss_scale": 16384.0})


def test_different_stream_orders_in_processes_are_detected() -> None:
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
