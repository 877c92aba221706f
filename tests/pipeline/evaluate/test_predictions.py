from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.errors import DataError
from pipeline.contract.task import Task
from pipeline.evaluate.predictions import join, measure

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
        (0.5, "found float"),
    ],
)
def test_a_metric_that_is_not_one_value_per_sample_is_named(values: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"accuracy must be a tensor of one value per sample.*{found}"):
        measure(task({"accuracy": values}), predict, BATCH)


@pytest.mark.parametrize("values", [{}, torch.zeros(3), None])
def test_metrics_must_be_a_mapping_with_something_in_it(values: Any) -> None:
    with pytest.raises(DataError, match="must return a mapping"):
        measure(task(values), predict, BATCH)


def test_booleans_and_integers_count_as_numbers() -> None:
    found = measure(task({"right": torch.tensor([True, False, True])}), predict, BATCH)
    assert found["right"].dtype == np.float64
    assert found["right"].tolist() == [1, 0, 1]


def classifier(predicted: Any, metric: str = "accuracy") -> Task:
    parts = {"classes": ("a", "b"), "predicted": lambda outputs: predicted, "actual": lambda batch: predicted}
    return task({metric: torch.zeros(3)}, **parts)


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        (torch.zeros(3), "one whole number per sample"),
        (torch.zeros(2, dtype=torch.int64), "one whole number per sample"),
        ([0, 1, 0], "found list"),
        (torch.tensor([0, 1, 2]), "outside the 2 classes"),
        (torch.tensor([0, -1, 1]), "outside the 2 classes"),
    ],
)
def test_a_predicted_class_that_is_none_is_refused(predicted: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        measure(classifier(predicted), predict, BATCH)


def test_a_metric_must_not_take_the_name_of_the_predicted_class() -> None:
    with pytest.raises(DataError, match="give it another name"):
        measure(classifier(torch.zeros(3, dtype=torch.int64), metric="predicted"), predict, BATCH)


def test_joining_keeps_order_and_skips_processes_that_had_no_samples() -> None:
    parts = [{"a": np.array([1.0, 2.0])}, {}, {"a": np.array([3.0])}]
    assert join(parts)["a"].tolist() == [1, 2, 3]


def test_a_metric_that_comes_and_goes_is_named() -> None:
    with pytest.raises(DataError, match="b is returned for some batches"):
        join([{"a": np.zeros(1)}, {"a": np.zeros(1), "b": np.zeros(1)}])
