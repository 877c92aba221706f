"""Groups of samples that must not get worse unseen: where the candidate falls below the baseline, and not by chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from evaluate.columns import Array
from evaluate.rule import Rule
from pipeline.spec.evaluation import Evaluate
from pipeline.spec.statistics.interval import Floats, Interval, mean_interval
from pipeline.spec.statistics.paired import fall_p_value
from pipeline.spec.statistics.power import holm, shared_confidence

CLASS = "class"  # the slices by true class
_RESAMPLES_TOLD = 2000  # of the intervals, which show and do not decide
_DRAWS_PER_SLICE = 20  # times the slices, over the level: else no adjusted value could ever fall below it


@dataclass(frozen=True)
class Slice:
    slice: str  # as in `length=short`
    samples: int
    candidate: float | None
    baseline: float | None
    difference: Interval | None  # all judged slices' intervals hold at once
    adjusted_p: float | None  # one-sided, that a fall of this size is chance; corrected for all that are judged
    judged: bool
    passed: bool
    detail: str


@dataclass(frozen=True)
class Group:
    """The members of one slice."""

    name: str
    members: Array  # indices of samples


def groups(labels: Mapping[str, Array], actual: Array | None, classes: Sequence[str] | None) -> Iterator[Group]:
    """By true class, whether it has samples or not; then by every label that a sample has."""
    if classes is not None and actual is not None:
        for index, name in enumerate(classes):
            yield Group(f"{CLASS}={name}", np.flatnonzero(actual == index))
    for column in sorted(labels):
        for label in np.unique(labels[column]):
            if label:
                yield Group(f"{column}={label}", np.flatnonzero(labels[column] == label))


def judge_slices(
    config: Evaluate, found: Sequence[Group], candidate: Floats, baseline: Floats | None
) -> tuple[Slice, ...]:
    """`candidate` and `baseline` have one value per sample, higher is better."""
    told = [_told(config, one, candidate, baseline) for one in found]
    judged = [i for i, one in enumerate(told) if one.judged]
    if baseline is None or not judged:
        return tuple(told)
    level = 1 - config.confidence
    draws = max(config.resamples, math.ceil(_DRAWS_PER_SLICE * len(judged) / level))
    differences = {i: (candidate - baseline)[found[i].members] for i in judged}
    adjusted = holm([fall_p_value(differences[i], draws, config.seed) for i in judged])
    shared = shared_confidence(config.confidence, len(judged))
    for i, p_value in zip(judged, adjusted, strict=True):
        interval = mean_interval(differences[i], shared, min(config.resamples, _RESAMPLES_TOLD), config.seed)
        told[i] = _judged(config, told[i], interval, p_value)
    return tuple(told)


def slice_rule(config: Evaluate, slices: Sequence[Slice]) -> Rule | None:
    """One rule for all of them; None where none is judged."""
    judged = [one for one in slices if one.judged and one.difference is not None]
    if not judged:
        return None
    how = (
        f"for each of {len(judged)} slices of {config.slice_min} samples at least: the difference in {config.metric} "
        f"to the baseline, and a one-sided sign-flip test, corrected by Holm at {1 - config.confidence:.2g}; a slice "
        f"fails where it falls by more than {config.slice_allowance:g} and that is no chance"
    )
    failed = [one for one in judged if not one.passed]
    worst = min((failed or judged), key=lambda one: one.difference.estimate if one.difference else 0.0)
    value = worst.difference.estimate if worst.difference else None
    if failed:
        text = "; ".join(one.detail for one in failed)
        assert value is not None
        change = f"a slice_margin of {-value:.4f} or more would have passed it"
        return Rule("slices", False, text, value, -config.slice_allowance, how, change)
    text = f"none of {len(judged)} slices falls by more than {config.slice_allowance:g} other than by chance"
    change = f"the lowest is {worst.slice} with a difference of {value:+.4f}"
    return Rule("slices", True, text, value, -config.slice_allowance, how, change)


def slice_doubts(config: Evaluate, slices: Sequence[Slice]) -> Iterator[str]:
    """What was not judged, in one line for each reason."""
    if empty := [one.slice for one in slices if not one.samples]:
        yield f"no sample in the test set of {_listed(empty)}: nothing is known there"
    small = [one for one in slices if 0 < one.samples < config.slice_min]
    if small:
        names = [f"{one.slice} ({one.samples})" for one in small]
        yield f"too few samples to judge: {_listed(names)}; evaluate.slice_min is {config.slice_min}"


def _told(config: Evaluate, group: Group, candidate: Floats, baseline: Floats | None) -> Slice:
    count = len(group.members)
    own = _mean(candidate[group.members])
    other = None if baseline is None else _mean(baseline[group.members])
    one = Slice(group.name, count, own, other, None, None, False, True, "")
    if not count:
        return replace(one, detail=f"{group.name} has no sample in the test set; not judged")
    if own is None or (baseline is not None and other is None):
        return replace(one, detail=f"{config.metric} is not a finite number in {group.name}; not judged")
    value = f"{config.metric} {own:.4f}"
    if count < config.slice_min:
        return replace(one, detail=f"{value}; fewer than {config.slice_min} samples, not judged")
    if other is None:
        return replace(one, detail=f"{value}; nothing to compare with, not judged")
    return replace(one, judged=True, detail=f"{value} against {other:.4f}")


def _judged(config: Evaluate, one: Slice, interval: Interval, p_value: float) -> Slice:
    chance = p_value >= 1 - config.confidence
    fallen = interval.estimate < -config.slice_allowance
    passed = chance or not fallen
    text = f"{config.metric} in {one.slice} differs by {interval.estimate:+.4f} from the baseline's"
    if not passed:
        text = (
            f"{config.metric} in {one.slice} falls by {-interval.estimate:.4f}, more than {config.slice_allowance:g}, "
            f"and not by chance (adjusted p = {p_value:.2g}, {one.samples} samples)"
        )
    elif fallen:
        text += f", which may be chance (adjusted p = {p_value:.2g})"
    return replace(one, difference=interval, adjusted_p=p_value, passed=passed, detail=text)


def _mean(values: Floats) -> float | None:
    if not len(values):
        return None
    value = float(values.mean())
    return value if math.isfinite(value) else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
