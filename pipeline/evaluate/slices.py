"""Groups of samples that must not get worse unseen: where the candidate falls below the baseline, and not by chance.

What is known of the samples themselves, whoever predicts: the truth, their queries, and the slices they are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.statistics.bootstrap import Floats, Interval, mean_interval
from pipeline.contract.statistics.significance import fall_p_value, holm, shared_confidence
from pipeline.contract.task import Classifier, HasSlices, Ranker, Regressor, Task
from pipeline.evaluate.predictions import ACTUAL, QUERY, SLICE, Array, Columns, classes_of, count_of, numbers_of
from pipeline.evaluate.rules import Rule

if TYPE_CHECKING:
    from pipeline.contract.task import Batch


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


_MOST_LABELS = 1000


def truth(task: Task, batch: Batch, columns: Sequence[str]) -> Columns:
    """`columns` are those of the data to slice by."""
    count = count_of(batch)
    return _actual(task, batch, count) | _by_column(batch, columns) | _by_task(task, batch, count)


def check_labels(columns: Columns) -> None:
    """Of the whole test set: a slice is a group of samples, not a name for each."""
    for name in (name for name in columns if name.startswith(SLICE)):
        if (found := len(np.unique(columns[name]))) > _MOST_LABELS:
            raise DataError(
                f"slices: `{name.removeprefix(SLICE)}` has {found} labels, {_MOST_LABELS} at most; group them"
            )


def _actual(task: Task, batch: Batch, count: int) -> Columns:
    if isinstance(task, Classifier):
        return {ACTUAL: classes_of(task, "actual", task.actual(batch), count)}
    if not isinstance(task, Regressor):
        return {}
    actual = numbers_of("actual", task.actual(batch), count)
    if not np.isfinite(actual).all():
        raise DataError("actual(): a true value of the test data is not a finite number")
    if not isinstance(task, Ranker):
        return {ACTUAL: actual}
    if (actual < 0).any():
        raise DataError("actual(): how relevant an item is must be 0 or more")
    return {ACTUAL: actual, QUERY: _queries(task.queries(batch), count)}


def _queries(value: object, count: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,) or value.is_floating_point():
        raise DataError(f"queries(): must be one whole number per sample, shape ({count},)")
    return value.detach().cpu().numpy().astype(np.int64)


def _by_column(batch: Batch, names: Sequence[str]) -> Columns:
    found = {}
    for name in names:
        if name not in batch:
            raise ConfigError(f"evaluate.slices: the test data have no column {name} (columns: {', '.join(batch)})")
        column = batch[name]
        if column.ndim != 1 or column.is_floating_point():
            raise ConfigError(f"evaluate.slices: column {name} must hold one whole number per sample; group it first")
        found[SLICE + name] = column.detach().cpu().numpy().astype(np.int64).astype(np.str_)
    return found


def _by_task(task: Task, batch: Batch, count: int) -> Columns:
    if not isinstance(task, HasSlices):
        return {}
    given = task.slices(batch)
    if not isinstance(given, Mapping):
        raise DataError("slices(): must return a mapping of names to one label per sample")
    return {SLICE + name: _labels(name, labels, count) for name, labels in given.items()}


def _labels(name: object, labels: object, count: int) -> Array:
    if not isinstance(name, str) or not name or "=" in name:
        raise DataError(f"slices(): {name!r} is no name for slices; use a word without an equals sign")
    if name == CLASS:
        raise DataError(f"slices(): `{CLASS}` is the true class already; give these slices another name")
    right = isinstance(labels, Sequence) and not isinstance(labels, str) and all(isinstance(one, str) for one in labels)
    if not right or len(labels) != count:  # type: ignore[arg-type]
        raise DataError(f"slices(): `{name}` must be one text for each of {count} samples")
    return np.array(list(labels), dtype=np.str_)  # type: ignore[call-overload]
