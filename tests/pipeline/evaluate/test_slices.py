from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch

from pipeline.contract.errors import ConfigError, DataError, GateError
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import Floats
from pipeline.contract.task import Task
from pipeline.evaluate.evaluate import evaluate
from pipeline.evaluate.predictions import measure
from pipeline.evaluate.slices import Group, Slice, check_labels, groups, judge_slices, slice_doubts, slice_rule, truth

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


FAST = Evaluate(resamples=200)


def judged(falls: Mapping[str, float], samples: int = 200, config: Evaluate = FAST, seed: int = 0) -> dict[str, Slice]:
    """Each slice's candidate is wrong that much more often than a baseline that is right nine times of ten."""
    generator = np.random.default_rng(seed)
    baseline = (generator.random(samples * len(falls)) < 0.9).astype(np.float64)
    candidate = baseline.copy()
    found = []
    for i, (name, fall) in enumerate(falls.items()):
        members = np.arange(i * samples, (i + 1) * samples)
        right = members[baseline[members] == 1]
        candidate[right[: round(fall * samples)]] = 0.0
        found.append(Group(name, members))
    return {one.slice: one for one in judge_slices(config, found, candidate, baseline)}


def test_a_slice_that_falls_fails_though_the_whole_hardly_moves() -> None:
    found = judged({"length=short": 0.2} | {f"length={i}": 0.0 for i in range(9)})
    short = found["length=short"]
    assert (short.judged, short.passed, short.samples) == (True, False, 200)
    assert short.adjusted_p is not None and short.adjusted_p < 1e-6
    assert "falls by 0.2000, more than 0.05, and not by chance" in short.detail
    assert all(one.passed for name, one in found.items() if name != "length=short")
    rule = slice_rule(FAST, list(found.values()))
    assert rule is not None and not rule.passed
    assert "an evaluate.margin of 0.2000 or more would have passed it" in rule.change


def test_a_fall_within_the_margin_or_by_chance_passes() -> None:
    assert judged({"a=b": 0.04})["a=b"].passed
    few = judged({"a=b": 0.1}, samples=30)["a=b"]  # three of thirty
    assert few.passed and "may be chance (adjusted p = 0.1" in few.detail


def test_a_wider_margin_lets_it_pass_and_counts_for_slices_too() -> None:
    assert judged({"a=b": 0.2}, config=Evaluate(resamples=200, margin=0.21))["a=b"].passed
    assert not judged({"a=b": 0.2}, config=Evaluate(resamples=200, margin=0.19))["a=b"].passed


def test_looking_at_many_slices_makes_each_count_less_and_hides_no_disaster() -> None:
    alone = judged({"a=b": 0.1}, samples=60)["a=b"]  # six of sixty: p = 1/64
    assert not alone.passed
    junk = {f"junk={i}": 0.0 for i in range(60)}
    assert judged({"a=b": 0.1} | junk, samples=60)["a=b"].passed
    assert not judged({"a=b": 0.4} | junk, samples=60)["a=b"].passed


def test_no_slice_makes_up_for_another() -> None:
    assert not judged({"a=worse": 0.2, "a=better": -0.1})["a=worse"].passed


def test_values_that_are_no_right_or_wrong_are_evaluated_too_however_few_resamples() -> None:
    generator = np.random.default_rng(2)
    baseline = generator.normal(size=2000)
    candidate = baseline + 0.05 * generator.normal(size=2000)
    candidate[:100] -= 0.5
    members = [Group(f"a={i}", np.arange(i * 100, (i + 1) * 100)) for i in range(20)]
    found = judge_slices(Evaluate(resamples=100), members, candidate, baseline)
    assert [one.passed for one in found] == [False] + [True] * 19


def test_empty_and_small_slices_are_reported_and_not_evaluated() -> None:
    values = np.ones(40)
    labels = {"place": np.array([""] * 5 + ["sea"] * 30 + ["air"] * 5)}
    found = groups(labels, np.zeros(40, np.int64), ("cat", "dog"))
    told = {one.slice: one for one in judge_slices(FAST, list(found), values, values)}
    assert list(told) == ["class=cat", "class=dog", "place=air", "place=sea"], "an empty label is no slice"
    assert told["class=dog"].detail == "class=dog has no sample in the test set; not judged"
    assert "fewer than 30 samples, not judged" in told["place=air"].detail
    assert [one.judged for one in told.values()] == [True, False, False, True]
    doubts = list(slice_doubts(FAST, list(told.values())))
    assert doubts[0] == "no sample in the test set of class=dog: nothing is known there"
    assert doubts[1] == "too few samples to judge: place=air (5); 30 are needed"


def test_without_a_baseline_slices_are_reported_alone() -> None:
    (one,) = judge_slices(FAST, [Group("a=b", np.arange(40))], np.ones(40), None)
    assert (one.judged, one.candidate, one.baseline) == (False, 1.0, None)
    assert slice_rule(FAST, [one]) is None


def test_a_value_that_is_not_finite_is_stated() -> None:
    values = np.ones(40)
    values[3] = np.nan
    (one,) = judge_slices(FAST, [Group("a=b", np.arange(40))], values, np.ones(40))
    assert (one.judged, one.candidate) == (False, None)
    assert "not a finite number in a=b" in one.detail


def false_alarms(trials: int, slices: int) -> float:
    """How often a candidate that is as good everywhere is stopped by any of its slices."""
    alarms, generator = 0, np.random.default_rng(5)
    found = [Group(f"a={i}", np.arange(i * 40, (i + 1) * 40)) for i in range(slices)]
    for _ in range(trials):
        difference: Floats = generator.choice([-1.0, 0.0, 1.0], size=40 * slices, p=[0.15, 0.7, 0.15])
        judged_slices = judge_slices(Evaluate(resamples=100), found, difference, np.zeros(40 * slices))
        alarms += not all(one.passed for one in judged_slices)
    return alarms / trials


def test_a_candidate_as_good_everywhere_is_local_sgd_stopped_by_a_slice() -> None:
    assert false_alarms(60, 8) <= 0.15


@pytest.mark.long
def test_however_many_slices_there_are_a_false_alarm_stays_at_its_level() -> None:
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


def test_slices_and_probabilities_go_through_the_step_into_its_files(
    with_baseline: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluate.slices.MIN_SLICE_SAMPLES", 10)
    with_baseline.add(SLICES)
    run = with_baseline.run("wrong", evaluate={"margin": 0.1, "slices": ["label"]})
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
