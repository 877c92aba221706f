"""Every metric of a test set as one thing to compare: the task's own means, and those of its kind of task.

How well each query's list is ordered: ndcg, mrr and auc per query, vectorised over all of them.

Where a classifier errs: the confusion matrix, and precision, recall and F1 of each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.contract.statistics.bootstrap import (
    Auc,
    Average,
    Explained,
    Floats,
    Interval,
    Mean,
    RootMean,
    Spearman,
    Statistic,
    aggregate_interval,
    contributions,
    mean_interval,
    value_of,
)
from pipeline.evaluate.predictions import ACTUAL, BASELINE, CANDIDATE, PREDICTED, PROBABILITIES, QUERY, Array

LOWER = ("mae", "rmse")  # of those that are computed here: the smaller the better
_MOST_CLASSES = 20  # for auc, which sorts the test set once for each


@dataclass(frozen=True)
class Measure:
    name: str
    candidate: Statistic | None  # None: undefined on this test set
    baseline: Statistic | None
    unit: Literal["samples", "queries"] = "samples"
    why: str = ""  # it is undefined
    note: str = ""  # what it leaves out
    slices: tuple[Floats, Floats | None] | None = None  # a value per sample by which slices are judged

    @property
    def better(self) -> Literal[1, -1]:
        return -1 if self.lower else 1

    @property
    def lower(self) -> bool:
        return self.name in LOWER and not isinstance(self.candidate, _OfTask)

    @property
    def units(self) -> int:
        return self.candidate.units if self.candidate else 0

    def value(self, owner: Literal["candidate", "baseline"]) -> float:
        statistic = self.candidate if owner == "candidate" else self.baseline
        return math.nan if statistic is None else value_of(statistic)

    def interval(self, owner: Literal["candidate", "baseline"], confidence: float, resamples: int) -> Interval | None:
        statistic = self.candidate if owner == "candidate" else self.baseline
        return None if statistic is None else _interval(statistic, None, 1, confidence, resamples, 0)

    def difference(self, confidence: float, resamples: int, seed: int) -> Interval | None:
        """Candidate less baseline, or the other way round where less is better: positive is better always."""
        if self.candidate is None or self.baseline is None:
            return None
        return _interval(self.candidate, self.baseline, self.better, confidence, resamples, seed)

    def contributions(self) -> Floats:
        assert self.candidate is not None
        return contributions(self.candidate, self.baseline, self.better)


class _OfTask(Mean):
    """What metrics() gave: higher is better, whatever its name."""


def _interval(
    first: Statistic, second: Statistic | None, better: int, confidence: float, resamples: int, seed: int
) -> Interval | None:
    if isinstance(first, Mean) and (second is None or isinstance(second, Mean)):
        values = better * (first.column if second is None else first.column - second.column)
        return mean_interval(values, confidence, resamples, seed) if math.isfinite(values.sum()) else None
    return aggregate_interval(first, second, confidence, resamples, seed, better)


def measures(columns: Mapping[str, Array], classes: Sequence[str] | None, compared: bool) -> dict[str, Measure]:
    """Those of the task first; where it has one of its own by a name, that is the one."""
    found = {one.name: one for one in _of_task(columns, compared)}
    for one in _of_kind(columns, classes, compared):
        found.setdefault(one.name, one)
    return found


def _of_task(columns: Mapping[str, Array], compared: bool) -> Iterator[Measure]:
    for name in columns:
        metric = name.removeprefix(CANDIDATE)
        if metric == name or metric in (PREDICTED, PROBABILITIES):
            continue
        own, other = columns[name], columns[BASELINE + metric] if compared else None
        yield Measure(metric, _OfTask(own), None if other is None else _OfTask(other), slices=(own, other))


def _of_kind(columns: Mapping[str, Array], classes: Sequence[str] | None, compared: bool) -> Iterator[Measure]:
    if ACTUAL not in columns:
        return
    owners = (CANDIDATE, BASELINE) if compared else (CANDIDATE,)
    if classes is not None:
        if CANDIDATE + PROBABILITIES in columns and len(classes) <= _MOST_CLASSES:
            yield _auc_of_classes([columns[owner + PROBABILITIES] for owner in owners], columns[ACTUAL], classes)
        return
    if CANDIDATE + PREDICTED not in columns:
        return
    predicted = [columns[owner + PREDICTED] for owner in owners]
    if not all(np.isfinite(one).all() for one in predicted):
        names = ("ndcg", "mrr", "auc") if QUERY in columns else ("mae", "rmse", "r2", "spearman")
        broken = [Mean(np.where(np.isfinite(one), 0.0, math.nan)) for one in predicted]
        yield from (Measure(name, *_pair(broken)) for name in names)
    elif QUERY in columns:
        yield from _of_lists(columns[QUERY], predicted, columns[ACTUAL])
    else:
        yield from _of_numbers(predicted, columns[ACTUAL])


def _of_numbers(predicted: list[Array], actual: Array) -> Iterator[Measure]:
    errors = [one - actual for one in predicted]
    absolute = [np.abs(one) for one in errors]
    squares = [one**2 for one in errors]
    near, close = _slices([-one for one in absolute]), _slices([-one for one in squares])
    yield Measure("mae", *_pair([Mean(one) for one in absolute]), slices=near)
    yield Measure("rmse", *_pair([RootMean(one) for one in squares]), slices=close)
    if _constant(actual):
        why = "all true values are equal"
        yield Measure("r2", None, None, why=why)
        yield Measure("spearman", None, None, why=why)
        return
    yield Measure("r2", *_pair([Explained(one, actual) for one in squares]), slices=close)
    stuck = next((who for who, one in zip(("candidate", "baseline"), predicted, strict=False) if _constant(one)), None)
    if stuck is None:
        yield Measure("spearman", *_pair([Spearman(one, actual) for one in predicted]))
    else:
        yield Measure("spearman", None, None, why=f"all values that the {stuck} predicts are equal")


def _of_lists(queries: Array, predicted: list[Array], relevance: Array) -> Iterator[Measure]:
    found = [per_query(queries, scores, relevance) for scores in predicted]
    for name, lacking in (("ndcg", "relevant"), ("mrr", "relevant"), ("auc", "relevant or no irrelevant")):
        known = np.isfinite(found[0][name])  # by the relevance alone, and so the same for both
        if not known.any():
            yield Measure(name, None, None, "queries", why=f"every query has no {lacking} item")
            continue
        left = int((~known).sum())
        note = f"{name} leaves out {left} of {len(known)} queries, which have no {lacking} item" if left else ""
        yield Measure(name, *_pair([Mean(one[name][known]) for one in found]), unit="queries", note=note)


def _auc_of_classes(probabilities: list[Array], actual: Array, classes: Sequence[str]) -> Measure:
    """Of two classes that of the second; of more the mean of each against all others."""
    wanted = [1] if len(classes) == 2 else range(len(classes))
    known = [i for i in wanted if 0 < (actual == i).sum() < len(actual)]
    if not known:
        return Measure("auc", None, None, why="the test set has samples of a single class")
    lacking = [str(classes[i]) for i in wanted if i not in known]
    note = f"auc leaves out {', '.join(lacking[:8])}: no sample of it in the test set" if lacking else ""
    averages = [Average([Auc(one[:, i].astype(np.float64), actual == i) for i in known]) for one in probabilities]
    return Measure("auc", *_pair(averages), note=note)


def _pair(found: Sequence[Statistic]) -> tuple[Statistic, Statistic | None]:
    return found[0], found[1] if len(found) > 1 else None


def _slices(found: list[Floats]) -> tuple[Floats, Floats | None]:
    return found[0], found[1] if len(found) > 1 else None


def _constant(values: Array) -> bool:
    return bool((values == values[0]).all())


def values_of(found: Mapping[str, Measure], owner: Literal["candidate", "baseline"]) -> dict[str, float]:
    """By name; what is undefined is left out."""
    chosen = {name: one.candidate if owner == "candidate" else one.baseline for name, one in found.items()}
    return {name: value_of(one) for name, one in chosen.items() if one is not None}


def per_query(queries: Array, scores: Floats, relevance: Floats) -> dict[str, Floats]:
    """One value per query and metric, NaN where it is undefined: no relevant item, or for auc no irrelevant one.

    Equal scores earn nothing: ndcg and auc take the mean over all orders of them, mrr the worst.
    """
    lists = np.unique(queries, return_inverse=True)[1]
    order = np.lexsort((-scores, lists))
    query, gain = lists[order], relevance[order]
    ties = _runs(query, scores[order])
    return {
        "ndcg": _ndcg(query, gain, ties, lists, relevance),
        "mrr": _mrr(query, gain > 0, ties),
        "auc": _auc(query, gain > 0, ties),
    }


def _runs(query: Array, score: Floats) -> Array:
    """The number of the run of equal scores each item is in; the list is ordered."""
    new = np.concatenate([[True], (query[1:] != query[:-1]) | (score[1:] != score[:-1])])
    return np.cumsum(new) - 1


def _places(query: Array) -> Array:
    """From 0 in each query; the list is ordered by query."""
    starts = np.flatnonzero(np.concatenate([[True], query[1:] != query[:-1]]))
    return np.arange(len(query)) - np.repeat(starts, np.diff(starts, append=len(query)))


def _ndcg(query: Array, gain: Floats, ties: Array, lists: Array, relevance: Floats) -> Floats:
    discount = 1 / np.log2(_places(query) + 2)
    share = np.bincount(ties, weights=gain) / np.bincount(ties)
    found = np.bincount(query, weights=share[ties] * discount)
    best = relevance[np.lexsort((-relevance, lists))]
    return _ratio(found, np.bincount(query, weights=best * discount))


def _mrr(query: Array, relevant: Array, ties: Array) -> Floats:
    """The first relevant item, last among those that score as it does."""
    size, hits = np.bincount(ties), np.bincount(ties, weights=relevant)
    first = np.unique(ties, return_index=True)[1]
    place = _places(query)[first] + size - hits + 1
    best = np.full(query[-1] + 1, math.inf)
    np.minimum.at(best, query[first], np.where(hits > 0, place, math.inf))
    return np.where(np.isfinite(best), 1 / best, math.nan)


def _auc(query: Array, relevant: Array, ties: Array) -> Floats:
    """Pairs of a relevant and an irrelevant item that are in the right order, ties half."""
    first = np.unique(ties, return_index=True)[1]
    owner = query[first]
    hits = np.bincount(ties, weights=relevant)
    misses = np.bincount(ties) - hits
    before = np.cumsum(misses) - misses  # irrelevant ones above, in this query and all before it
    of_query = np.bincount(query, weights=~relevant)
    before -= (np.cumsum(of_query) - of_query)[owner]
    right = np.bincount(owner, weights=hits * (of_query[owner] - before - misses / 2))
    return _ratio(right, np.bincount(owner, weights=hits) * of_query)


def _ratio(part: Array, whole: Array) -> Floats:
    found: Floats = np.divide(part, whole, out=np.full(len(part), math.nan), where=whole > 0)
    return found


Integers = np.ndarray[Any, Any]


def confusion(actual: Integers, predicted: Integers, count: int) -> Integers:
    """Rows are true classes, columns predicted ones."""
    return np.bincount(actual * count + predicted, minlength=count * count).reshape(count, count)


def per_class(matrix: Integers, classes: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """A ratio with nothing to divide by is None: the recall of a class never seen, the precision of one never said."""
    right = np.diag(matrix)
    seen, claimed = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall, f1 = (
        _class_ratio(right, claimed),
        _class_ratio(right, seen),
        _class_ratio(2 * right, seen + claimed),
    )
    return {
        str(name): {
            "samples": int(seen[i]),
            "precision": precision[i],
            "recall": recall[i],
            "f1": f1[i],
        }
        for i, name in enumerate(classes)
    }


def _class_ratio(part: Integers, whole: Integers) -> list[float | None]:
    return [float(one / all_) if all_ else None for one, all_ in zip(part.tolist(), whole.tolist(), strict=True)]
