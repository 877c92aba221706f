from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import Task
from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.slices import (
    Group,
    Slice,
    check_slice_labels,
    compare_slices,
    label_columns,
    slice_groups,
    slice_rule,
    slice_warnings,
)
from pipeline.statistics.aggregates import Floats
from pipeline.statistics.scores import score_batch
from pipeline.system.errors import ConfigError, DataError, GateError

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


RULES = Evaluate()


def compared(
    decreases: Mapping[str, float], samples: int = 200, config: Evaluate = RULES, seed: int = 0
) -> dict[str, Slice]:
    """Compare slices whose candidate is wrong that much more often than a baseline with an accuracy of 0.9."""
    generator = np.random.default_rng(0)
    baseline = (generator.random(samples * len(decreases)) < 0.9).astype(np.float64)
    candidate = baseline.copy()
    groups = []
    for i, (name, decrease) in enumerate(decreases.items()):
        members = np.arange(i * samples, (i + 1) * samples)
        right = members[baseline[members] == 1]
        candidate[right[: round(decrease * samples)]] = 0.0
        groups.append(Group(name, members))
    return {one.slice: one for one in compare_slices(config, groups, candidate, baseline)}


def test_slice_that_decreases_fails_though_the_mean_hardly_moves() -> None:
    found = compared({"length=short": 0.2} | {f"length={i}": 0.0 for i in range(9)})
    short = found["length=short"]
    assert (short.judged, short.passed, short.samples) == (True, False, 200)
    assert short.adjusted_p is not None and short.adjusted_p < 1e-6
    assert "is 0.2000 worse than the baseline's; 0.05 is allowed (adjusted p" in short.detail
    assert all(one.passed for name, one in found.items() if name != "length=short")
    rule = slice_rule(RULES, list(found.values()))
    assert rule is not None and not rule.passed
    assert "an evaluate.margin of 0.2000 or more would have passed it" in rule.change


def test_decrease_within_the_margin_or_by_chance_passes() -> None:
    assert compared({"a=b": 0.04})["a=b"].passed
    few = compared({"a=b": 0.1}, samples=30)["a=b"]  # three of thirty
    assert few.passed and "not significant (adjusted p = 0.1" in few.detail
    assert compared({"a=b": 0.2}, config=Evaluate(margin=0.21))["a=b"].passed
    assert not compared({"a=b": 0.2}, config=Evaluate(margin=0.19))["a=b"].passed
    assert not compared({"a=worse": 0.2, "a=better": -0.1})["a=worse"].passed, "a better slice is no compensation"


def test_correction_for_many_slices_still_finds_large_decreases() -> None:
    single = compared({"a=b": 0.1}, samples=60)["a=b"]  # six of sixty: p = 1/64
    assert not single.passed
    junk = {f"junk={i}": 0.0 for i in range(60)}
    assert compared({"a=b": 0.1} | junk, samples=60)["a=b"].passed
    assert not compared({"a=b": 0.4} | junk, samples=60)["a=b"].passed


def test_continuous_values_are_tested_in_each_of_many_slices() -> None:
    generator = np.random.default_rng(2)
    baseline = generator.normal(size=2000)
    candidate = baseline + 0.05 * generator.normal(size=2000)
    candidate[:100] -= 0.5
    members = [Group(f"a={i}", np.arange(i * 100, (i + 1) * 100)) for i in range(20)]
    found = compare_slices(Evaluate(), members, candidate, baseline)
    assert [one.passed for one in found] == [False] + [True] * 19


def test_empty_and_small_slices_are_reported_but_not_evaluated() -> None:
    values = np.ones(40)
    labels = {"place": np.array([""] * 5 + ["sea"] * 30 + ["air"] * 5)}
    found = slice_groups(labels, np.zeros(40, np.int64), ("cat", "dog"))
    slices = {one.slice: one for one in compare_slices(RULES, list(found), values, values)}
    assert list(slices) == ["class=cat", "class=dog", "place=air", "place=sea"], "an empty label is no slice"
    assert slices["class=dog"].detail == "class=dog has no sample in the test set; not evaluated"
    assert "fewer than 30 samples, not evaluated" in slices["place=air"].detail
    assert [one.judged for one in slices.values()] == [True, False, False, True]
    warnings = list(slice_warnings(list(slices.values())))
    assert warnings[0] == "the test set has no sample of class=dog"
    assert warnings[1] == "too few samples to evaluate: place=air (5); 30 are needed"


def test_slices_without_a_baseline_or_with_nan_are_only_reported() -> None:
    values = np.ones(40)
    (one,) = compare_slices(RULES, [Group("a=b", np.arange(40))], values, None)
    assert (one.judged, one.candidate, one.baseline) == (False, 1.0, None)
    assert slice_rule(RULES, [one]) is None
    values[3] = np.nan
    (one,) = compare_slices(RULES, [Group("a=b", np.arange(40))], values, np.ones(40))
    assert (one.judged, one.candidate) == (False, None)
    assert "not a finite number in a=b" in one.detail


def false_alarms(trials: int, slices: int) -> float:
    """Return how often an equally good candidate is stopped by any of its slices."""
    alarms, generator = 0, np.random.default_rng(5)
    found = [Group(f"a={i}", np.arange(i * 40, (i + 1) * 40)) for i in range(slices)]
    for _ in range(trials):
        difference: Floats = generator.choice([-1.0, 0.0, 1.0], size=40 * slices, p=[0.15, 0.7, 0.15])
        slices_ = compare_slices(Evaluate(), found, difference, np.zeros(40 * slices))
        alarms += not all(one.passed for one in slices_)
    return alarms / trials


def test_equal_candidate_is_rarely_stopped_by_a_slice() -> None:
    assert false_alarms(60, 8) <= 0.15


@pytest.mark.long
def test_false_alarms_stay_at_the_level_for_many_slices() -> None:
    assert false_alarms(1000, 10) <= 0.05 + 0.015


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


def test_slices_and_probabilities_are_written_to_the_results(
    with_baseline: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluate.slices.MIN_SLICE_SAMPLES", 10)
    with_baseline.add(SLICES)
    run = with_baseline.run("wrong", evaluate={"margin": 0.1, "slices": ["label"]})
    with pytest.raises(GateError, match=r"\(also failed: slices\)"):
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
                        "detail", "change"}  # fmt: skip
    assert set(one["difference"]) == {"estimate", "low", "high"}
    assert set(verdict["calibration"]["candidate"]) >= {"ece", "brier", "bins"}
    assert set(verdict["calibration"]["candidate"]["bins"][0]) == {"low", "high", "count", "confidence", "accuracy"}
    assert verdict["test_fingerprint"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a"] * 3, "must return a mapping"),
        ({"place": ["a", "b"]}, "`place` must be one string for each of 3 samples"),
        ({"place": "abc"}, "`place` must be one string for each of 3 samples"),
        ({"place": [1, 2, 3]}, "`place` must be one string for each of 3 samples"),
        ({"class": ["a"] * 3}, "`class` is the name of the slices by class"),
        ({"a=b": ["a"] * 3}, "is not a valid name"),
    ],
)
def test_invalid_slices_are_rejected(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        label_columns(task(slices=lambda batch: given), BATCH, ())


def test_integer_columns_can_be_slices() -> None:
    assert label_columns(task(), BATCH, ("region",))["slice.region"].tolist() == ["1", "2", "2"]
    with pytest.raises(ConfigError, match="no column country"):
        label_columns(task(), BATCH, ("country",))
    with pytest.raises(ConfigError, match="column x must have one integer per sample"):
        label_columns(task(), BATCH, ("x",))


def test_slices_with_a_label_per_sample_are_rejected() -> None:
    with pytest.raises(DataError, match="`user` has 1001 labels, at most 1000 are allowed; to fix it: group them"):
        check_slice_labels({"slice.user": np.arange(1001).astype(np.str_)})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"actual": lambda batch: torch.full((3,), torch.nan)}, "not a finite number"),
        (
            {"actual": lambda batch: torch.zeros(3, 1, 1)},
            r"one number per sample, shape \(3,\), .* not shape \(3, 1, 1\)",
        ),
        ({"actual": lambda batch: -torch.ones(3), "queries": lambda batch: torch.zeros(3)}, "must be 0 or more"),
        ({"queries": lambda batch: torch.zeros(3)}, "one integer per sample"),
    ],
)
def test_invalid_labels_are_rejected(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        label_columns(task(**more), BATCH, ())


@pytest.mark.parametrize(
    ("rows", "classes", "message"),
    [
        (torch.zeros(3, 3), ("a", "b"), r"must have shape \(3, 2\)"),
        (torch.zeros(3, 2), ("a", "b"), "apply a softmax"),
        (torch.tensor([[1.5, -0.5]] * 3), ("a", "b"), "apply a softmax"),
        (torch.full((3, 2), torch.nan), ("a", "b"), "apply a softmax"),
        (torch.ones(3, 1), (), "needs `classes`"),
    ],
)
def test_invalid_probabilities_are_rejected(rows: torch.Tensor, classes: tuple[str, ...], message: str) -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    more: dict[str, Any] = {"classes": classes, "predicted": lambda _: zeros, "actual": lambda _: zeros}
    kind = task(probabilities=lambda _: rows, **(more if classes else {}))
    with pytest.raises(DataError, match=message):
        score_batch(kind, lambda _: rows, BATCH)
