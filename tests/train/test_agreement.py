from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.spec.data import Samples
from train.agreement import describe, disagreement

from .conftest import Project, failure


class Items:
    """A data set that is asked for its items one by one; each time it draws them anew."""

    def __init__(self, widths: list[int]) -> None:
        self._widths = widths

    def __len__(self) -> int:
        return len(self._widths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.rand(self._widths[index])}


def columns(**changes: Any) -> dict[str, str]:
    values: dict[str, Any] = {"x": np.zeros((100, 3), np.float32), "y": np.arange(100), **changes}
    return describe(Samples("train", {name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"x": np.zeros((100, 4), np.float32)},
            "column x is (3,) torch.float32 on rank 0, 2 and (4,) torch.float32",
        ),
        ({"x": np.zeros((100, 3))}, "column x is (3,) torch.float32 on rank 0, 2 and (3,) torch.float64 on rank 1"),
        ({"y": None}, "column y is () torch.int64 on rank 0, 2 and missing on rank 1"),
        ({"x": np.zeros((99, 3), np.float32), "y": np.arange(99)}, "its length is 100 on rank 0, 2 and 99 on rank 1"),
        ({"y": np.arange(100)[::-1].copy()}, "what is in column y is "),
    ],
)
def test_what_differs_is_named_with_the_ranks(changes: dict[str, Any], told: str) -> None:
    found = disagreement([columns(), columns(**changes), columns()])
    assert found.startswith(told)


def test_equal_splits_agree() -> None:
    assert disagreement([columns(), columns(), columns()]) == ""
    assert disagreement([columns()]) == ""


def test_samples_drawn_anew_in_every_process_agree_by_their_shape() -> None:
    found = [describe(Samples("train", Items([3, 3, 3]))) for _ in range(2)]  # type: ignore[arg-type]
    assert disagreement(found) == ""


def test_the_last_sample_is_looked_at_too() -> None:
    found = [describe(Samples("train", Items(widths))) for widths in ([3, 3, 3], [3, 3, 4])]  # type: ignore[arg-type]
    assert "(3,) torch.float32 at first, (4,) torch.float32 at last on rank 1" in disagreement(found)


def test_half_precision_is_compared_as_any_other() -> None:
    assert disagreement([columns(x=torch.ones(100, dtype=torch.bfloat16))] * 2) == ""


def test_a_split_that_differs_between_processes_is_refused_before_the_first_step(project: Project) -> None:
    run = project.run()
    project.replace("self.counts[split], 3", 'self.counts[split] - int(__import__("os").environ["RANK"]), 3')
    assert project.train(run, processes=2).returncode != 0
    assert str(failure(run)).startswith(
        "data('train') differs between processes: its length is 37 on rank 0 and 36 on rank 1; it must give"
    )
    assert not (run.partial("train") / "checkpoints").exists()


def test_a_split_smaller_than_the_world_is_refused(project: Project) -> None:
    project.replace('"validation": 11', '"validation": 1')
    run = project.run()
    assert project.train(run, processes=2).returncode != 0
    assert "data('validation'): 1 samples for 2 processes; lower train.processes" in str(failure(run))
