from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from evaluate.evaluation import evaluate
from evaluate.prediction import measure
from evaluate.truth import check_labels, truth
from pipeline.spec.errors import ConfigError, DataError, GateError
from pipeline.spec.task import Task

if TYPE_CHECKING:
    from tests.evaluate.conftest import Project

BATCH = {"x": torch.zeros(3, 2), "region": torch.tensor([1, 2, 2])}

SLICES = """
    def slices(self, batch):
        first = batch["pair"][:, 0]
        return {"first": ["high" if one > 0 else "low" for one in first.tolist()]}

    def probabilities(self, outputs):
        return outputs.softmax(dim=1)
"""


def task(**more: Any) -> Task:
    def numbers(_: Any) -> torch.Tensor:
        return torch.zeros(3)

    parts = {"metrics": lambda outputs, batch: {"own": torch.zeros(3)}, "predicted": numbers, "actual": numbers}
    return cast("Task", SimpleNamespace(**{**parts, **more}))


def test_slices_and_probabilities_go_through_the_step_into_its_files(with_baseline: Project) -> None:
    with_baseline.add(SLICES)
    run = with_baseline.run(
        "wrong", evaluate={"margin": 9.0, "slice_min": 10, "slice_margin": 0.1, "slices": ["label"]}
    )
    with pytest.raises(GateError, match=r"accuracy in first=high falls by 1\.0000, more than 0\.1"):
        evaluate(run, with_baseline.root)
    with np.load(run.partial("evaluate") / "predictions.npz", allow_pickle=False) as arrays:
        assert set(arrays["slice.first"]) == {"high", "low"}
        assert set(arrays["slice.label"]) == {"0", "1"}
        assert arrays["candidate.probabilities"].shape == (50, 2)
        assert arrays["candidate.probabilities"].dtype == np.float32
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert {one["slice"] for one in verdict["slices"]} == {
        "class=first", "class=second", "first=high", "first=low", "label=0", "label=1"}  # fmt: skip
    one = verdict["slices"][0]
    assert set(one) == {"slice", "samples", "candidate", "baseline", "difference", "adjusted_p", "judged", "passed",
                        "detail"}  # fmt: skip
    assert set(one["difference"]) == {"estimate", "low", "high"}
    assert set(verdict["calibration"]["candidate"]) >= {"ece", "brier", "bins"}
    assert set(verdict["calibration"]["candidate"]["bins"][0]) == {"low", "high", "count", "confidence", "accuracy"}
    assert verdict["test_fingerprint"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"] * 3, "must return a mapping"),
        ({"place": ["a", "b"]}, "`place` must be one text for each of 3 samples"),
        ({"place": "abc"}, "`place` must be one text for each of 3 samples"),
        ({"place": [1, 2, 3]}, "`place` must be one text for each of 3 samples"),
        ({"class": ["a"] * 3}, "`class` is the true class already"),
        ({"a=b": ["a"] * 3}, "is no name for slices"),
    ],
)
def test_slices_that_are_none_are_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        truth(task(slices=lambda batch: given), BATCH, ())


def test_a_column_of_whole_numbers_makes_slices_and_another_is_refused() -> None:
    assert truth(task(), BATCH, ("region",))["slice.region"].tolist() == ["1", "2", "2"]
    with pytest.raises(ConfigError, match="no column country"):
        truth(task(), BATCH, ("country",))
    with pytest.raises(ConfigError, match="column x must hold one whole number per sample"):
        truth(task(), BATCH, ("x",))


def test_a_name_for_each_sample_is_no_slice() -> None:
    with pytest.raises(DataError, match="`user` has 1001 labels, 1000 at most; group them"):
        check_labels({"slice.user": np.arange(1001).astype(np.str_)})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"actual": lambda batch: torch.full((3,), torch.nan)}, "not a finite number"),
        ({"actual": lambda batch: torch.zeros(3, 1)}, r"one number per sample, shape \(3,\), found shape \(3, 1\)"),
        ({"actual": lambda batch: -torch.ones(3), "queries": lambda batch: torch.zeros(3)}, "must be 0 or more"),
        ({"queries": lambda batch: torch.zeros(3)}, "one whole number per sample"),
    ],
)
def test_a_truth_that_is_none_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        truth(task(**more), BATCH, ())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(3, 3), r"must have shape \(3, 2\)"),
        (torch.zeros(3, 2), "is a softmax missing"),
        (torch.tensor([[1.5, -0.5]] * 3), "is a softmax missing"),
        (torch.full((3, 2), torch.nan), "is a softmax missing"),
    ],
)
def test_probabilities_that_are_none_are_refused(rows: torch.Tensor, message: str) -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    kind = task(classes=("a", "b"), predicted=lambda _: zeros, actual=lambda _: zeros, probabilities=lambda _: rows)
    with pytest.raises(DataError, match=message):
        measure(kind, lambda _: rows, BATCH)


def test_probabilities_without_classes_have_no_meaning() -> None:
    with pytest.raises(DataError, match="needs `classes`"):
        measure(task(probabilities=lambda _: torch.ones(3, 1)), lambda _: torch.zeros(3), BATCH)
