from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.task import Task
from pipeline.statistics.scores import join_parts, score_batch
from pipeline.system.errors import DataError

BATCH = {"x": torch.zeros(3, 2)}


def task(metrics: Any, **more: Any) -> Task:
    return cast("Task", SimpleNamespace(metrics=lambda outputs, batch: metrics, **more))


def predict(batch: Any) -> Tensor:
    return torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.tensor(0.5), r"shape \(\)"),
        (torch.zeros(3, 1), r"shape \(3, 1\)"),
        (torch.zeros(2), r"shape \(2,\)"),
        (0.5, "not float"),
    ],
)
def test_metric_without_one_value_per_sample_is_named(values: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"accuracy must be a tensor of one value per sample.*{found}"):
        score_batch(task({"accuracy": values}), predict, BATCH)


@pytest.mark.parametrize("values", [{}, torch.zeros(3), None])
def test_metrics_must_be_a_mapping_that_is_not_empty(values: Any) -> None:
    with pytest.raises(DataError, match="must return a mapping"):
        score_batch(task(values), predict, BATCH)


def test_booleans_and_integers_become_floats() -> None:
    columns = score_batch(task({"right": torch.tensor([True, False, True])}), predict, BATCH)
    assert columns["right"].dtype == np.float64
    assert columns["right"].tolist() == [1, 0, 1]


def classifier(predicted: Any, metric: str = "accuracy") -> Task:
    parts = {"classes": ("a", "b"), "predicted": lambda outputs: predicted, "actual": lambda batch: predicted}
    return task({metric: torch.zeros(3)}, **parts)


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (torch.zeros(3), "one integer per sample"),
        (torch.zeros(2, dtype=torch.int64), "one integer per sample"),
        ([0, 1, 0], "not list"),
        (torch.tensor([0, 1, 2]), "outside the 2 classes"),
        (torch.tensor([0, -1, 1]), "outside the 2 classes"),
    ],
)
def test_invalid_predicted_class_is_rejected(predicted: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        score_batch(classifier(predicted), predict, BATCH)


def test_metric_cannot_use_a_reserved_name() -> None:
    with pytest.raises(DataError, match="give the metric another name"):
        score_batch(classifier(torch.zeros(3, dtype=torch.int64), metric="predicted"), predict, BATCH)


def test_parts_are_joined_in_order_and_empty_ones_skipped() -> None:
    parts = [{"a": np.array([1.0, 2.0])}, {}, {"a": np.array([3.0])}]
    assert join_parts(parts)["a"].tolist() == [1, 2, 3]


def test_metric_missing_in_some_batches_is_named() -> None:
    with pytest.raises(DataError, match="b is returned for some batches"):
        join_parts([{"a": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(1)}])
