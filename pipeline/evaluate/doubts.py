"""What makes a verdict worth little although every rule passes: it is written into the verdict's first line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import scipy  # type: ignore[import-untyped]

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.slices import MAX_NAMES, MIN_SLICE_SAMPLES, Group, Slice
from pipeline.statistics.aggregates import Mean
from pipeline.statistics.metrics import Metric
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, PREDICTED, QUERY, Array, Columns
from pipeline.system.wording import join_names

_LEVEL = 0.025  # one-sided, at which a baseline counts as better than chance
_MIN_WRONG = 3  # samples of a slice that are all wrong


def chance_reason(columns: Columns, classes: Sequence[str] | None) -> str:
    """Return why the baseline's answers are no better than chance; empty if they are better or it is not known."""
    predicted, actual = columns.get(BASELINE + PREDICTED), columns.get(ACTUAL)
    if predicted is None or actual is None or QUERY in columns:
        return ""
    if (predicted == predicted[0]).all() and predicted.ndim > 1:
        return "the baseline predicts the same for every sample"
    if (predicted == predicted[0]).all():
        constant = predicted[0] if classes is None else classes[int(predicted[0])]
        return f"the baseline always predicts {constant if classes is not None else f'{constant:.4g}'}"
    if classes is None:
        return ""
    shares = [np.bincount(values, minlength=len(classes)) / len(actual) for values in (predicted, actual)]
    hits, by_chance = int((predicted == actual).sum()), float(shares[0] @ shares[1])
    if float(scipy.special.bdtrc(hits - 1, len(actual), by_chance)) < _LEVEL:
        return ""
    return f"the baseline is right in {hits} of {len(actual)} samples, no more often than by chance"


def find_doubts(
    config: Evaluate,
    columns: Columns,
    classes: Sequence[str] | None,
    metrics: Mapping[str, Metric],
    slices: Sequence[Slice],
    compared: bool,
) -> Iterator[str]:
    """Yield a clause for each reason to distrust a candidate that passes."""
    if not compared and not config.require:
        yield "nothing is required: there is no baseline and no evaluate.require"
    predicted, actual = columns.get(CANDIDATE + PREDICTED), columns.get(ACTUAL)
    is_perfect = predicted is not None and actual is not None and bool((predicted == actual).all())
    decisive = metrics[config.metric].candidate
    if isinstance(decisive, Mean) and not is_perfect and _is_constant(decisive.column):
        yield f"{config.metric} is {decisive.column[0]:.4g} for every sample; check metrics()"
    if classes is not None and predicted is not None and actual is not None:
        yield from _dead_classes(predicted, actual, classes)
    wrong = [
        slice_.slice
        for slice_ in slices
        if _MIN_WRONG <= slice_.samples < MIN_SLICE_SAMPLES and slice_.candidate == 0.0 and _is_share(decisive)
    ]
    if wrong:
        yield f"every sample is wrong in {join_names(wrong, MAX_NAMES)}, which is too small to be judged"


def find_weak_slices(columns: Columns, classes: Sequence[str] | None, groups: Sequence[Group]) -> str:
    """Return in which slices both models are right no more often than one answer would be; empty if in none.

    A slice with a single class does not count, because no answer is better there.
    """
    actual, weak = columns.get(ACTUAL), []
    if classes is None or actual is None or BASELINE + PREDICTED not in columns:
        return ""
    right = [columns[owner + PREDICTED] == actual for owner in (CANDIDATE, BASELINE)]
    for group in groups:
        counts = np.bincount(actual[group.members], minlength=len(classes))
        most_hits = max(int(each[group.members].sum()) for each in right)
        if MIN_SLICE_SAMPLES <= len(group.members) > counts.max() >= most_hits:
            weak.append(f"`{classes[int(counts.argmax())]}` in {group.name} ({len(group.members)} samples)")
    return f"neither model is better than always answering {join_names(weak, MAX_NAMES)}" if weak else ""


def _dead_classes(predicted: Array, actual: Array, classes: Sequence[str]) -> Iterator[str]:
    occurring = np.bincount(actual, minlength=len(classes))
    answered = np.bincount(predicted, minlength=len(classes))
    dead = [str(name) for name, true, found in zip(classes, occurring, answered, strict=True) if true and not found]
    if dead:
        yield f"never predicted: {join_names(dead, MAX_NAMES)}"


def _is_constant(values: Array) -> bool:
    return len(values) > 1 and math.isfinite(float(values[0])) and bool((values == values[0]).all())


def _is_share(statistic: object) -> bool:
    """Return True for a metric of right and wrong answers, where 0 means that all are wrong."""
    return isinstance(statistic, Mean) and bool(np.isin(statistic.column, (0.0, 1.0)).all())
