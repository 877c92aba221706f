"""Slices of the test set: in none of them may the candidate be significantly worse than the baseline.

Also the columns that describe the samples themselves: labels, queries, and the slices that each sample is in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.contract.results import finite_or_none
from pipeline.contract.settings.stages import Evaluate
from pipeline.contract.task import Batch, HasSlices, Task
from pipeline.evaluate.rules import GateRule, digits, position
from pipeline.statistics.aggregates import Floats, Mean
from pipeline.statistics.intervals import Interval, difference_interval
from pipeline.statistics.scores import SLICE, Array, Columns, actual_columns, batch_length
from pipeline.statistics.significance import RESAMPLES, bonferroni_confidence, decrease_p_value, holm
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.wording import join_names

CLASS = "class"  # name of the slices by true class
MIN_SLICE_SAMPLES = 30  # smaller slices are not evaluated
MAX_NAMES = 8  # of slices in a message
_DRAWS_PER_SLICE = 20  # divided by the level: with fewer, no corrected p-value could be below it


@dataclass(frozen=True)
class Slice:
    slice: str  # as in `length=short`
    samples: int
    candidate: float | None
    baseline: float | None
    difference: Interval | None  # the intervals of all slices hold at the same time; None if it cannot be computed
    adjusted_p: float | None  # one-sided p-value of the decrease, corrected for the number of slices
    judged: bool
    passed: bool
    detail: str
    change: float | None = None  # estimated difference, where positive is better


@dataclass(frozen=True)
class Group:
    """The samples of one slice."""

    name: str
    members: Array  # indices of samples


def slice_groups(labels: Mapping[str, Array], actual: Array | None, classes: Sequence[str] | None) -> Iterator[Group]:
    """Yield a group for every class, also empty ones, then one for every slice label that occurs."""
    if classes is not None and actual is not None:
        for index, name in enumerate(classes):
            yield Group(f"{CLASS}={name}", np.flatnonzero(actual == index))
    for column in sorted(labels):
        for label in np.unique(labels[column]):
            if label:
                yield Group(f"{column}={label}", np.flatnonzero(labels[column] == label))


def compare_slices(
    config: Evaluate,
    groups: Sequence[Group],
    candidate: Floats,
    baseline: Floats | None,
    better: int = 1,
    incomparable: str = "",
) -> tuple[Slice, ...]:
    """Compare each slice; `candidate` and `baseline` have one value per sample, higher is better.

    `better`: -1 for negative values of a metric where lower is better, which is shown as it is. `incomparable`: why a
    loss against this baseline shows nothing, if so: one that always gives one answer is right wherever that is true.
    """
    slices = [_measure_slice(config, group, candidate, baseline, better) for group in groups]
    if incomparable:
        return tuple(
            replace(slice_, judged=False, detail=f"{slice_.detail}; {incomparable}: not evaluated")
            if slice_.judged
            else slice_
            for slice_ in slices
        )
    evaluated = [i for i, slice_ in enumerate(slices) if slice_.judged]
    if baseline is None or not evaluated:
        return tuple(slices)
    level = 1 - config.confidence
    draws = max(RESAMPLES, math.ceil(_DRAWS_PER_SLICE * len(evaluated) / level))
    differences = {i: (candidate - baseline)[groups[i].members] for i in evaluated}
    adjusted = holm([decrease_p_value(differences[i], draws) for i in evaluated])
    confidence = bonferroni_confidence(config.confidence, len(evaluated))
    for i, p_value in zip(evaluated, adjusted, strict=True):
        members = groups[i].members
        interval = difference_interval(Mean(candidate[members]), Mean(baseline[members]), confidence)
        slices[i] = _decide_slice(config, slices[i], float(differences[i].mean()), interval, p_value)
    return tuple(slices)


def slice_rule(config: Evaluate, slices: Sequence[Slice]) -> GateRule | None:
    """Return one rule for all slices; None if none is evaluated."""
    evaluated = [slice_ for slice_ in slices if slice_.judged and slice_.change is not None]
    if not evaluated:
        return None
    how = (
        f"for each of {len(evaluated)} slices with at least {MIN_SLICE_SAMPLES} samples: the difference in "
        f"{config.metric} to the {config.opponent}, and a one-sided sign-flip test with Holm correction; a slice fails "
        f"if it is worse by more than {config.slice_allowance:g} and this is significant at {1 - config.confidence:.2g}"
    )
    failed = [slice_ for slice_ in evaluated if not slice_.passed]
    worst = min((failed or evaluated), key=lambda slice_: slice_.change or 0.0)
    value = worst.change or 0.0
    if failed:
        others = [slice_.slice for slice_ in failed if slice_ is not worst]
        text = worst.detail + (f"; also failed: {join_names(others, MAX_NAMES)}" if others else "")
        change = f"an {config.margin_setting} of {digits(-value)} or more would have passed it"
        return GateRule("slices", False, text, value, -config.slice_allowance, how, change)
    text = f"none of {len(evaluated)} slices is significantly worse by more than {config.slice_allowance:g}"
    change = f"the worst is {worst.slice}, {position(value, config.opponent)}"
    return GateRule("slices", True, text, value, -config.slice_allowance, how, change)


def slice_warnings(slices: Sequence[Slice]) -> Iterator[str]:
    """Yield a line for each reason why slices were not evaluated."""
    if empty := [slice_.slice for slice_ in slices if not slice_.samples]:
        yield f"the test set has no sample of {join_names(empty, MAX_NAMES)}"
    small_slices = [slice_ for slice_ in slices if 0 < slice_.samples < MIN_SLICE_SAMPLES]
    if small_slices:
        names = [f"{slice_.slice} ({slice_.samples})" for slice_ in small_slices]
        yield f"too few samples to evaluate: {join_names(names, MAX_NAMES)}; {MIN_SLICE_SAMPLES} are needed"


def _measure_slice(config: Evaluate, group: Group, candidate: Floats, baseline: Floats | None, better: int) -> Slice:
    count = len(group.members)
    candidate_value = _mean(better * candidate[group.members])
    baseline_value = None if baseline is None else _mean(better * baseline[group.members])
    slice_ = Slice(group.name, count, candidate_value, baseline_value, None, None, False, True, "")
    if not count:
        return replace(slice_, detail=f"{group.name} has no sample in the test set; not evaluated")
    if candidate_value is None or (baseline is not None and baseline_value is None):
        return replace(slice_, detail=f"{config.metric} is not a finite number in {group.name}; not evaluated")
    text = f"{config.metric} {digits(candidate_value)}"
    if count < MIN_SLICE_SAMPLES:
        return replace(slice_, detail=f"{text}; fewer than {MIN_SLICE_SAMPLES} samples, not evaluated")
    if baseline_value is None:
        return replace(slice_, detail=f"{text}; nothing to compare with, not evaluated")
    return replace(slice_, judged=True, detail=f"{text} against {digits(baseline_value)}")


def _decide_slice(config: Evaluate, slice_: Slice, change: float, interval: Interval | None, p_value: float) -> Slice:
    significant = p_value < 1 - config.confidence
    is_decrease = change < -config.slice_allowance
    is_passed = not (significant and is_decrease)
    text = f"{config.metric} in {slice_.slice} is {position(change, config.opponent)}"
    if not is_passed:
        text += f"; {config.slice_allowance:g} is allowed (adjusted p = {p_value:.2g}, {slice_.samples} samples)"
    elif is_decrease:
        text += f", which is not significant (adjusted p = {p_value:.2g})"
    return replace(slice_, difference=interval, adjusted_p=p_value, passed=is_passed, detail=text, change=change)


def _mean(values: Floats) -> float | None:
    if not len(values):
        return None
    return finite_or_none(values.mean())


_MAX_LABELS = 1000


def label_columns(task: Task, batch: Batch, columns: Sequence[str]) -> Columns:
    """Return the columns that describe the samples; `columns` are columns of the data to slice by."""
    count = batch_length(batch)
    return actual_columns(task, batch, count) | _column_slices(batch, columns) | _task_slices(task, batch, count)


def check_slice_labels(columns: Columns) -> None:
    """Reject slices with almost as many labels as samples."""
    for name in (name for name in columns if name.startswith(SLICE)):
        if (count := len(np.unique(columns[name]))) > _MAX_LABELS:
            raise DataError(
                f"slices: `{name.removeprefix(SLICE)}` has {count} labels, at most {_MAX_LABELS} are allowed; "
                "to fix it: group them"
            )


def _column_slices(batch: Batch, names: Sequence[str]) -> Columns:
    slices = {}
    for name in names:
        if name not in batch:
            raise ConfigError(f"evaluate.slices: the test data has no column {name} (columns: {', '.join(batch)})")
        column = batch[name]
        if column.ndim != 1 or column.is_floating_point():
            raise ConfigError(f"evaluate.slices: column {name} must have one integer per sample; group it first")
        slices[SLICE + name] = column.detach().cpu().numpy().astype(np.int64).astype(np.str_)
    return slices


def _task_slices(task: Task, batch: Batch, count: int) -> Columns:
    if not isinstance(task, HasSlices):
        return {}
    slices = task.slices(batch)
    if not isinstance(slices, Mapping):
        raise DataError("slices(): must return a mapping of names to one label per sample")
    return {SLICE + name: _slice_labels(name, labels, count) for name, labels in slices.items()}


def _slice_labels(name: object, labels: object, count: int) -> Array:
    if not isinstance(name, str) or not name or "=" in name:
        raise DataError(f"slices(): {name!r} is not a valid name; to fix it: use a name without an equals sign")
    if name == CLASS:
        raise DataError(f"slices(): `{CLASS}` is the name of the slices by class; to fix it: use another name")
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    if not is_list or len(labels) != count or not all(isinstance(label, str) for label in labels):  # type: ignore[arg-type, attr-defined]
        raise DataError(f"slices(): `{name}` must be one string for each of {count} samples")
    return np.array(list(labels), dtype=np.str_)  # type: ignore[call-overload]
