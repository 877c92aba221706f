from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from evaluate.slices import Group, Slice, groups, judge_slices, slice_doubts, slice_rule
from pipeline.spec.evaluation import Evaluate
from pipeline.spec.statistics.interval import Floats

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
    assert "a slice_margin of 0.2000 or more would have passed it" in rule.change


def test_a_fall_within_the_margin_or_by_chance_passes() -> None:
    assert judged({"a=b": 0.04})["a=b"].passed
    few = judged({"a=b": 0.1}, samples=30)["a=b"]  # three of thirty
    assert few.passed and "may be chance (adjusted p = 0.1" in few.detail


def test_a_wider_margin_lets_it_pass_and_counts_for_slices_too() -> None:
    assert judged({"a=b": 0.2}, config=Evaluate(resamples=200, slice_margin=0.21))["a=b"].passed
    assert judged({"a=b": 0.2}, config=Evaluate(resamples=200, margin=0.21))["a=b"].passed
    assert not judged({"a=b": 0.2}, config=Evaluate(resamples=200, margin=0.21, slice_margin=0.1))["a=b"].passed


def test_looking_at_many_slices_makes_each_count_less_and_hides_no_disaster() -> None:
    alone = judged({"a=b": 0.1}, samples=60)["a=b"]  # six of sixty: p = 1/64
    assert not alone.passed
    junk = {f"junk={i}": 0.0 for i in range(60)}
    assert judged({"a=b": 0.1} | junk, samples=60)["a=b"].passed
    assert not judged({"a=b": 0.4} | junk, samples=60)["a=b"].passed


def test_no_slice_makes_up_for_another() -> None:
    assert not judged({"a=worse": 0.2, "a=better": -0.1})["a=worse"].passed


def test_values_that_are_no_right_or_wrong_are_judged_too_however_few_resamples() -> None:
    generator = np.random.default_rng(2)
    baseline = generator.normal(size=2000)
    candidate = baseline + 0.05 * generator.normal(size=2000)
    candidate[:100] -= 0.5
    members = [Group(f"a={i}", np.arange(i * 100, (i + 1) * 100)) for i in range(20)]
    found = judge_slices(Evaluate(resamples=100), members, candidate, baseline)
    assert [one.passed for one in found] == [False] + [True] * 19


def test_empty_and_small_slices_are_told_and_not_judged() -> None:
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
    assert doubts[1] == "too few samples to judge: place=air (5); evaluate.slice_min is 30"


def test_without_a_baseline_slices_are_told_alone() -> None:
    (one,) = judge_slices(FAST, [Group("a=b", np.arange(40))], np.ones(40), None)
    assert (one.judged, one.candidate, one.baseline) == (False, 1.0, None)
    assert slice_rule(FAST, [one]) is None


def test_a_value_that_is_not_finite_is_said() -> None:
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


def test_a_candidate_as_good_everywhere_is_seldom_stopped_by_a_slice() -> None:
    assert false_alarms(60, 8) <= 0.15


@pytest.mark.long
def test_however_many_slices_there_are_a_false_alarm_stays_at_its_level() -> None:
    assert false_alarms(1000, 10) <= 0.05 + 0.015
