"""Checks of labels by the inputs: unknown classes, another numbering, a column that leaks, a formula of all labels.

They are computed from at most a few thousand samples of training and test data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment, linprog  # type: ignore[import-untyped]
from torch import Tensor

from pipeline.data_checks.profile import LABEL, VALUE, Floats, Integers, as_floats, as_ids, feature_kind
from pipeline.data_checks.rules import MAX_NAMES, CheckResult, Severity
from pipeline.system.wording import join_names

MAX_PROBES = 2048  # test samples whose labels are compared with the inputs
_MIN_PROBES = 50
_UNLIKELY = 1e-3  # that a random split leaves a class out of training
_CERTAIN = 4.5  # standard deviations
_MAX_SINGLE = 256  # columns that are tried alone
_SCORE = 0.99  # of one column alone, on samples that were not used to fit
_MAJORITY = 0.95
_GAP = 0.1  # to the score of all other columns together
_LINEAR_SCORE = 0.999  # share of the variance of a number that one column alone explains
_FORMULA_SCORE = 0.9999  # share of the variance of a number that a formula explains
_FORMULAS = (*((1, size) for size in range(1, 9)), (2, 1), (2, 2), (2, 3))  # degree, and number of columns
_SAMPLES_PER_TERM = 50  # of a formula; fewer fit by chance
_MAX_THRESHOLDS = 4
_SIZE = 64  # numbers per column in the linear model
_BINS = 13
_MAX_VALUES = 64  # up to here each value of a column is a bin


def check_label_sets(classes: Mapping[str, Mapping[str, int] | None], severity: Severity) -> Iterator[CheckResult]:
    """Yield a failure for classes in another split that training lacks, unless chance explains it."""
    train = classes["train"]
    for split, counts in classes.items():
        if split == "train" or not counts or not train:
            continue
        share = sum(counts.values()) / max(sum(counts.values()) + sum(train.values()), 1)
        unknown = [
            name
            for name, count in counts.items()
            if count and not train[name] and share**count < _UNLIKELY / len(train)
        ]
        if unknown:
            samples = sum(counts[name] for name in unknown)
            detail = (
                f"{samples} samples have a label that no training sample has ({', '.join(unknown[:5])}); to fix it: "
                "number the labels alike in all splits, or add such samples to the training data"
            )
            yield CheckResult("label_set", f"{split}.labels", severity, False, detail, float(samples), 0.0)


def check_numbering(
    train: Mapping[str, Tensor], test: Mapping[str, Tensor], inputs: Sequence[str], severity: Severity
) -> Iterator[CheckResult]:
    """Yield a failure if a linear model of the training data fits the test labels only in another order."""
    if not _has_single_labels(train, LABEL) or not _has_single_labels(test, LABEL) or len(test[LABEL]) < _MIN_PROBES:
        return
    if len(train[LABEL]) < 2 * _MIN_PROBES:
        return
    labels, actual = (as_ids(side[LABEL])[:, 0] for side in (train, test))
    classes = np.unique(labels)
    actual = np.searchsorted(classes, actual).clip(max=len(classes) - 1)
    encoder = _Encoder(train, inputs)
    points, probes = encoder.rows(train), encoder.rows(test)
    if not points.shape[1] or points.shape[1] != probes.shape[1] or len(classes) < 2:
        return
    fit, held = _halves(len(labels))
    target = np.searchsorted(classes, labels)
    weights = _ridge(points[fit], np.eye(len(classes))[target[fit]])
    expected = float((_predict(points[held], weights) == target[held]).mean())
    predicted = _predict(probes, weights)
    matrix = np.zeros((len(classes), len(classes)))
    np.add.at(matrix, (actual, predicted), 1)
    order = linear_sum_assignment(-matrix)[1]
    score, reordered = np.trace(matrix) / len(actual), matrix[np.arange(len(classes)), order].sum() / len(actual)
    deviation = np.sqrt(expected * (1 - expected) * (1 / len(held) + 1 / len(actual)) + 1 / len(actual) ** 2)
    if expected - score > _CERTAIN * deviation and reordered - score > (expected - score) / 2:
        moved = [f"{classes[i]} → {classes[j]}" for i, j in enumerate(order) if i != j and matrix[i].sum()]
        detail = (
            f"by their inputs, the test labels are numbered differently than in training ({', '.join(moved[:5])}): a "
            f"linear model is right in {score:.0%} of the test samples, in {reordered:.0%} with the labels in that "
            f"order, and in {expected:.0%} of held-out training samples; to fix it: number the labels alike in all "
            "splits"
        )
        yield CheckResult("label_set", "test.labels", severity, False, detail, float(score), expected)


def check_leaks(train: Mapping[str, Tensor], inputs: Sequence[str], severity: Severity) -> Iterator[CheckResult]:
    """Yield a failure for a column that alone predicts the label, or else a warning if a formula gives all labels."""
    name = LABEL if LABEL in train else VALUE
    if not _has_single_labels(train, name) or len(train[name]) < 2 * _MIN_PROBES:
        return
    is_class = name == LABEL
    values = as_ids(train[name])[:, 0] if is_class else as_floats(train[name])[:, 0]
    if not np.isfinite(values).all() or len(np.unique(values)) < 2:
        return
    fit, held = _halves(len(values))
    if is_class and np.unique(values[held], return_counts=True)[1].max() > _MAJORITY * len(held):
        return
    limit, score_of = (_SCORE, _class_score) if is_class else (_LINEAR_SCORE, _linear_score)
    singles = _single_columns(train, inputs)
    scores = {column: score_of(numbers, values, fit, held) for column, numbers in singles.items()}
    leaks = {column: score for column, score in scores.items() if score > limit}
    others = _Encoder(train, inputs).rows(train, without=leaks) if leaks else np.empty((0, 0))
    alone = [scores[name] for name in scores.keys() - leaks]
    # With a single column, or with such columns only, there is nothing to compare with.
    rest = max([_joint_score(others, values, fit, held, is_class), *alone]) if others.shape[1] else 1.0
    leaks = {column: score for column, score in leaks.items() if score - rest > _GAP}
    for column, score in leaks.items():
        detail = (
            f"this column alone predicts the label with a score of {score:.3f} on held-out training samples, all "
            f"others together {rest:.3f}: it may be computed from the label; to fix it: remove it from the inputs, "
            "or set prepare.leaks=warn if it is known before the answer"
        )
        yield CheckResult("leak", f"train.{column}", severity, False, detail, score, limit)
    if leaks or not 0 < len(singles) <= _SIZE or train[name][:1].numel() != 1:
        return
    chosen = np.concatenate([fit[: MAX_PROBES // 2], held[: MAX_PROBES // 2]])
    rows = np.column_stack(list(singles.values()))[chosen].clip(-1e100, 1e100)
    if used := _find_formula(rows, values[chosen], is_class):
        names = join_names([list(singles)[i] for i in sorted(used)], MAX_NAMES)
        detail = (
            f"the labels follow exactly from {names}; if they are computed from the inputs, no model is needed; if a "
            "column was made from the label, remove it"
        )
        yield CheckResult("formula", "train", "warn", False, detail)


def _find_formula(rows: Floats, values: Any, is_class: bool) -> list[int]:
    """Return the columns of which few thresholds, or a sum of them and their products, give all values exactly."""
    spread, half = rows.std(axis=0), len(rows) // 2
    rows = (rows - rows.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    count, most = rows.shape[1], len(rows) // _SAMPLES_PER_TERM
    terms: list[tuple[int, ...]] = [(i,) for i in range(count)]
    if count * (count + 3) <= len(rows):
        terms += itertools.combinations_with_replacement(range(count), 2)
    table = np.column_stack([rows[:, term].prod(axis=1) for term in terms])
    centred = values - values.mean()
    weights = _ridge(table[:half], centred[:half, None])[:, 0]
    sizes = [max(abs(weight) for term, weight in zip(terms, weights, strict=False) if i in term) for i in range(count)]
    if not is_class:
        rest = centred[half:] - _extend(table[half:]) @ weights
        is_exact = (rest**2).mean() < (1 - _FORMULA_SCORE) * centred[half:].var()
        return [i for i, size in enumerate(sizes) if is_exact and size > 0.01 * max(sizes)]
    if used := _find_thresholds(rows, values, min(_MAX_THRESHOLDS, most)):
        return used
    order: list[int] = np.argsort(sizes)[::-1].tolist()
    for degree, size in _FORMULAS:
        kept = [i for i, term in enumerate(terms) if len(term) <= degree and set(term) <= set(order[:size])]
        if len(kept) <= most and _are_separable(table[:, kept], values):
            return order[:size]
    return []


def _find_thresholds(rows: Floats, labels: Any, limit: int) -> list[int]:
    """Return the columns of thresholds that each part off samples of one class, until one class is left."""
    used: list[int] = []
    while len(np.unique(labels)) > 1:
        if len(used) == limit:
            return []
        both = np.concatenate([rows, -rows], axis=1)
        is_other = labels[:, None] != labels[both.argmin(axis=0)]
        is_pure = both < np.where(is_other, both, np.inf).min(axis=0)
        best = int(is_pure.sum(axis=0).argmax())
        used.append(best % rows.shape[1])
        rows, labels = rows[~is_pure[:, best]], labels[~is_pure[:, best]]
    return list(dict.fromkeys(used))


def _are_separable(rows: Floats, labels: Any) -> bool:
    """Whether planes separate each class from those after it."""
    sides = (np.where(labels > label, -1.0, 1.0)[:, None] * _extend(rows) for label in np.unique(labels)[:-1])
    planes = (linprog(np.zeros(side.shape[1]), side, -np.ones(len(side)), bounds=(None, None)) for side in sides)
    return all(plane.status == 0 for plane in planes)


def _has_single_labels(batch: Mapping[str, Tensor], name: str) -> bool:
    """Whether each sample has one label; those of a tagger or of a picture have many."""
    return name in batch and all(len(column) == len(batch[name]) for column in batch.values())


def _halves(count: int) -> tuple[Integers, Integers]:
    order = np.random.Generator(np.random.PCG64(8)).permutation(count)
    return order[: count // 2], order[count // 2 :]


def _single_columns(batch: Mapping[str, Tensor], inputs: Sequence[str]) -> dict[str, Floats]:
    """Return the numbers of scalars and short vectors by name; tokens, pictures and long vectors have none."""
    singles: dict[str, Floats] = {}
    for name in inputs:
        kind, column = feature_kind(batch[name]), batch[name]
        if kind == "sums" or (kind == "ids" and column[:1].numel() != 1):
            continue
        rows = as_floats(column)
        for i in range(rows.shape[1]):
            singles[f"{name}[{i}]" if rows.shape[1] > 1 else name] = np.nan_to_num(rows[:, i])
    return singles if len(singles) <= _MAX_SINGLE else {}


def _class_score(values: Floats, labels: Any, fit: Integers, held: Integers) -> float:
    """Return the accuracy on held-out samples of the most common class in each bin of the values."""
    distinct = np.unique(values[fit])
    if len(distinct) > _MAX_VALUES:
        ordered, wide = np.sort(values[fit]), np.argsort(np.diff(distinct))[-2 * _BINS :]
        quantiles = ordered[np.arange(1, _BINS) * len(ordered) // _BINS]
        edges = np.unique(np.concatenate([quantiles, (distinct[wide] + distinct[wide + 1]) / 2]))
    else:
        edges = (distinct[1:] + distinct[:-1]) / 2
    classes, codes = np.unique(labels, return_inverse=True)
    bins = np.searchsorted(edges, values)
    counts = np.zeros((len(edges) + 1, len(classes)))
    np.add.at(counts, (bins[fit], codes[fit]), 1)
    return float((counts.argmax(axis=1)[bins[held]] == codes[held]).mean())


def _linear_score(values: Floats, numbers: Any, fit: Integers, held: Integers) -> float:
    return _joint_score(_standardize(values[:, None], values[:, None]), numbers, fit, held, is_class=False)


def _joint_score(rows: Floats, values: Any, fit: Integers, held: Integers, is_class: bool) -> float:
    """Return the accuracy, or the share of explained variance, of a linear model with squares."""
    rows = np.concatenate([rows, rows**2], axis=1)
    if is_class:
        classes, codes = np.unique(values, return_inverse=True)
        weights = _ridge(rows[fit], np.eye(len(classes))[codes[fit]])
        return float((_predict(rows[held], weights) == codes[held]).mean())
    predicted = _extend(rows[held]) @ _ridge(rows[fit], values[fit][:, None])
    rest, total = ((values[held] - predicted[:, 0]) ** 2).mean(), values[held].var()
    return float(1 - rest / total) if total > 0 else 0.0


def _extend(rows: Floats) -> Floats:
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def _ridge(rows: Floats, targets: Floats) -> Floats:
    extended = _extend(rows)
    square = extended.T @ extended + 1e-3 * len(rows) * np.eye(extended.shape[1]) * 1e-3
    return np.asarray(np.linalg.solve(square, extended.T @ targets))


def _predict(rows: Floats, weights: Floats) -> Integers:
    return np.asarray((_extend(rows) @ weights).argmax(axis=1), np.int64)


def _standardize(rows: Floats, reference: Floats) -> Floats:
    """Return the rows in units of the reference's spread, without outliers."""
    spread = reference.std(axis=0)
    return np.asarray(np.clip((rows - reference.mean(axis=0)) / np.where(spread > 0, spread, 1.0), -5, 5))


class _Encoder:
    """Converts the inputs of samples to a few numbers: themselves, projections of long ones, frequencies of tokens."""

    def __init__(self, train: Mapping[str, Tensor], inputs: Sequence[str]) -> None:
        self.inputs = inputs
        self.reference = {name: _numbers(train[name]) for name in inputs}

    def rows(self, batch: Mapping[str, Tensor], without: Mapping[str, float] | None = None) -> Floats:
        parts: list[Floats] = [np.empty((len(next(iter(batch.values()))), 0))]
        for name in self.inputs:
            numbers, reference = _numbers(batch[name]), self.reference[name]
            width = min(numbers.shape[1], reference.shape[1])
            names = [f"{name}[{i}]" for i in range(width)] if width > 1 else [name]
            kept = [i for i in range(width) if names[i] not in (without or {})]
            parts.append(_standardize(numbers[:, kept], reference[:, kept]))
        rows = np.concatenate(parts, axis=1)
        return rows if rows.shape[1] <= 4 * _SIZE else _project(rows, 4 * _SIZE)


def _numbers(column: Tensor) -> Floats:
    if feature_kind(column) == "ids" and column[:1].numel() > 1:
        ids = as_ids(column) % _SIZE
        counts = np.zeros((len(ids), _SIZE))
        np.add.at(counts, (np.arange(len(ids))[:, None], ids), 1.0)
        return counts
    rows = np.nan_to_num(as_floats(column), nan=0.0, posinf=0.0, neginf=0.0).clip(-1e100, 1e100)
    return rows if rows.shape[1] <= 256 else _project(rows, _SIZE)


def _project(rows: Floats, size: int) -> Floats:
    signs = np.random.Generator(np.random.PCG64(9)).integers(0, 2, (rows.shape[1], size)) * 2.0 - 1
    return np.asarray(rows @ signs / np.sqrt(rows.shape[1]))
