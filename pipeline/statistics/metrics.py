"""Metrics of a test set: means of the task's own, and built-in ones of classifiers, regression, forecasts and ranking.

Ranking metrics (ndcg, mrr, auc) are computed per query, vectorized over all queries. Metrics of one horizon of a
forecast, as `mae_7`, have intervals only where they are named, because there may be thousands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from pipeline.contract.results import finite_or_none
from pipeline.contract.task import HasDirections, Task
from pipeline.statistics.aggregates import (
    Auc,
    Average,
    CalibrationError,
    CoverageError,
    ExplainedVariance,
    Floats,
    Mean,
    RootMean,
    Spearman,
    Statistic,
    contributions,
    mean_by_sample,
    ratio,
)
from pipeline.statistics.intervals import Interval, difference_interval, metric_interval
from pipeline.statistics.scores import (
    ACTUAL,
    BASELINE,
    CANDIDATE,
    LEVELS,
    OUTPUTS,
    PREDICTED,
    PROBABILITIES,
    QUANTILES,
    QUERY,
    Array,
)
from pipeline.statistics.significance import brier_scores, confidences_and_hits
from pipeline.system.errors import ConfigError, DataError

_Value = TypeVar("_Value")
Owner: TypeAlias = Literal["candidate", "baseline"]
BRIER_RANGE = (0.0, 2.0)
_REGRESSION, _RANKING = ("mae", "rmse", "r2", "spearman"), ("ndcg", "mrr", "auc")
_LOWER_IS_BETTER = ("mae", "rmse", "pinball", "coverage_error")
_FORECAST = ("mae", "rmse", "r2", "pinball", "coverage_error")
# Words in the names of metrics where lower usually is better.
_ERROR_WORDS = (
    *("loss", "error", "err", "mae", "mse", "rmse", "mape", "rmsle", "nll", "wer", "cer", "perplexity"),
    *("brier", "distance", "deviation", "regret", "pinball"),
)
_NEGATED = ("neg", "negative", "minus")
_MAX_AUC_CLASSES = 20  # for auc, which sorts the test set once per class


@dataclass(frozen=True)
class Metric:
    name: str
    candidate: Statistic | None  # None: undefined on this test set
    baseline: Statistic | None
    unit: Literal["samples", "queries"] = "samples"
    why: str = ""  # the metric is undefined
    note: str = ""  # on samples that it leaves out
    slices: tuple[Floats, Floats | None] | None = None  # values per sample where higher is better, for slices
    lower: bool = False  # lower is better

    @property
    def better(self) -> Literal[1, -1]:
        return -1 if self.lower else 1

    @property
    def units(self) -> int:
        return self.candidate.units if self.candidate else 0

    def statistic(self, owner: Owner) -> Statistic | None:
        return self.candidate if owner == "candidate" else self.baseline

    def value(self, owner: Owner) -> float:
        statistic = self.statistic(owner)
        return math.nan if statistic is None else statistic.estimate

    def interval(self, owner: Owner, confidence: float) -> Interval | None:
        statistic = self.statistic(owner)
        return None if statistic is None else metric_interval(statistic, confidence)

    def difference(self, confidence: float) -> Interval | None:
        """Return the interval of the difference, signed so that positive is better; None if it cannot be computed."""
        if self.candidate is None or self.baseline is None:
            return None
        if self.lower:
            return difference_interval(self.baseline, self.candidate, confidence)
        return difference_interval(self.candidate, self.baseline, confidence)

    @property
    def has_limits(self) -> bool:
        """Return whether one sample can change the metric only so much."""
        statistic = self.baseline or self.candidate
        if statistic is None or isinstance(statistic, Spearman) or statistic.limits is not None:
            return True
        return isinstance(statistic, Mean) and bool(np.isin(statistic.column, (0.0, 1.0)).all())

    @property
    def unit_size(self) -> float:
        """Return 1 for a metric with limits, such as accuracy, and for r2, else how large the baseline's value is."""
        statistic = self.baseline or self.candidate
        if statistic is None or self.has_limits or isinstance(statistic, ExplainedVariance):
            return 1.0
        return abs(statistic.estimate) if math.isfinite(statistic.estimate) and statistic.estimate else 1.0

    @property
    def differing(self) -> int:
        """Number of samples or queries in which candidate and baseline differ."""
        return 0 if self.candidate is None else self.candidate.informative(self.baseline)

    def contributions(self) -> Floats:
        assert self.candidate is not None
        return contributions(self.candidate, self.baseline, self.better)


def lower_is_better(task: Task) -> frozenset[str]:
    """Return the task's own metrics for which it declares that lower is better."""
    directions = task.directions if isinstance(task, HasDirections) else {}
    return frozenset(name for name, direction in directions.items() if direction == "lower")


def check_directions(task: Task, names: Collection[str]) -> None:
    """Refuse a metric whose name reads like that of an error until the task declares its direction."""
    directions = task.directions if isinstance(task, HasDirections) else {}
    for name in (name for name in names if name not in directions):
        words = set(re.split(r"[^a-z]+", name.lower()))
        if words.intersection(_ERROR_WORDS) and not words.intersection(_NEGATED):
            raise ConfigError(
                f"metrics() returns `{name}`, which reads like an error, but higher values would be better; to fix it: "
                f'set directions = {{"{name}": "lower"}} in the task, or "higher" if that is meant'
            )


def compute_metrics(
    columns: Mapping[str, Array],
    classes: Sequence[str] | None,
    compared: bool,
    lower: Collection[str] = (),
    named: Collection[str] = (),
) -> dict[str, Metric]:
    """Return the metrics of the task, then the built-in ones; a task's metric replaces a built-in one of that name.

    `lower`: metrics of the task where lower is better. `named`: metrics that are needed, also those of one horizon.
    """
    metrics = {metric.name: metric for metric in _task_metrics(columns, compared, lower)}
    for metric in _builtin_metrics(columns, classes, compared):
        metrics.setdefault(metric.name, metric)
    for name in sorted({*named} - metrics.keys()):
        kind, _, horizon = name.rpartition("_")
        is_known = kind in _FORECAST and ACTUAL in columns and columns[ACTUAL].ndim > 1 and horizon.isdecimal()
        if is_known and 0 < int(horizon) <= columns[ACTUAL].shape[1]:
            at_horizon = _metrics_at(columns, int(horizon) - 1, compared)
            metrics |= {name: replace(at_horizon[kind], name=name)} if kind in at_horizon else {}
    return metrics


def by_horizon(columns: Mapping[str, Array], compared: bool) -> dict[str, Any]:
    """Return of a forecast the metrics of each horizon, and the shares of true values at or below each quantile."""
    if ACTUAL not in columns or columns[ACTUAL].ndim == 1:
        return {}
    owners: tuple[Owner, ...] = ("candidate", "baseline") if compared else ("candidate",)
    metrics = [_metrics_at(columns, i, compared) for i in range(columns[ACTUAL].shape[1])]
    values = {
        name: {owner: [finite_or_none(each[name].value(owner)) for each in metrics] for owner in owners}
        for name in metrics[0]
    }
    if LEVELS not in columns:
        return {"horizons": values}
    shares = {name: coverage(columns[f"{name}.{QUANTILES}"], columns[ACTUAL]).mean(axis=0).tolist() for name in owners}
    return {"horizons": values, "coverage": {"level": columns[LEVELS][0].tolist(), **shares}}


def _metrics_at(columns: Mapping[str, Array], place: int, compared: bool) -> dict[str, Metric]:
    """Return the metrics of one horizon of a forecast."""
    names = [name for name, column in columns.items() if column.ndim > 1 and name != LEVELS]
    part = {**columns, **{name: columns[name][:, place : place + 1] for name in names}}
    return {metric.name: metric for metric in _builtin_metrics(part, None, compared) if metric.name in _FORECAST[:4]}


def calibration_metrics(columns: Mapping[str, Array], compared: bool) -> Iterator[Metric]:
    """Yield what `evaluate.require` can limit besides metrics, if the task has probabilities: brier and ece."""
    if ACTUAL not in columns or CANDIDATE + PROBABILITIES not in columns:
        return
    actual = columns[ACTUAL]
    owners = (CANDIDATE, BASELINE) if compared else (CANDIDATE,)
    rows = [columns[owner + PROBABILITIES].astype(np.float64) for owner in owners]
    yield Metric("brier", *_pair([Mean(brier_scores(row, actual), BRIER_RANGE) for row in rows]), lower=True)
    yield Metric("ece", *_pair([CalibrationError(*confidences_and_hits(row, actual)) for row in rows]), lower=True)


def _task_metrics(columns: Mapping[str, Array], compared: bool, lower: Collection[str]) -> Iterator[Metric]:
    for name in columns:
        metric = name.removeprefix(CANDIDATE)
        if metric == name or metric in OUTPUTS:
            continue
        values = [columns[owner + metric] for owner in ((CANDIDATE, BASELINE) if compared else (CANDIDATE,))]
        is_lower = metric in lower
        slices = _pair([-column if is_lower else column for column in values])
        yield Metric(metric, *_pair([Mean(column) for column in values]), slices=slices, lower=is_lower)


def _builtin_metrics(columns: Mapping[str, Array], classes: Sequence[str] | None, compared: bool) -> Iterator[Metric]:
    if ACTUAL not in columns:
        return
    owners = (CANDIDATE, BASELINE) if compared else (CANDIDATE,)
    if classes is not None:
        if CANDIDATE + PROBABILITIES in columns and len(classes) <= _MAX_AUC_CLASSES:
            yield _classifier_auc([columns[owner + PROBABILITIES] for owner in owners], columns[ACTUAL], classes)
        return
    if CANDIDATE + PREDICTED not in columns:
        return
    predicted, actual = [columns[owner + PREDICTED] for owner in owners], columns[ACTUAL]
    for values, method in zip(predicted, ("predicted()", "predicted() of baseline()"), strict=False):
        if values.shape != actual.shape:
            shapes = " and ".join(f"(samples, {x.shape[1]})" if x.ndim > 1 else "(samples,)" for x in (values, actual))
            raise DataError(f"{method} and actual() have the shapes {shapes}; to fix it: give both the same")
    quantiles = [columns[owner + QUANTILES] for owner in owners if owner + QUANTILES in columns]
    finite = [np.isfinite(values).reshape(len(values), -1).all(axis=1) for values in (*predicted, *quantiles)]
    if not all(values.all() for values in finite):
        forecast = _FORECAST if quantiles else _FORECAST[:3]
        names = _RANKING if QUERY in columns else _REGRESSION if actual.ndim == 1 else forecast
        sides = [np.logical_and.reduce(finite[i :: len(owners)]) for i in range(len(owners))]
        broken = [Mean(np.where(values, 0.0, math.nan)) for values in sides]
        yield from (Metric(name, *_pair(broken), lower=name in _LOWER_IS_BETTER) for name in names)
    elif QUERY in columns:
        yield from _ranking_metrics(columns[QUERY], predicted, actual)
    else:
        yield from _regression_metrics(predicted, actual)
        if quantiles:
            yield from _quantile_metrics(quantiles, actual, columns[LEVELS][0])


def _quantile_metrics(quantiles: list[Array], actual: Array, levels: Array) -> Iterator[Metric]:
    losses = [np.zeros(len(actual)) for _ in quantiles]
    for values, loss in zip(quantiles, losses, strict=True):
        for i, level in enumerate(levels.tolist()):
            error = actual - values[:, :, i]
            loss += mean_by_sample(np.maximum(level * error, (level - 1) * error)) / len(levels)
    yield Metric("pinball", *_pair([Mean(loss) for loss in losses]), slices=_pair([-x for x in losses]), lower=True)
    errors = [CoverageError(coverage(values, actual), levels) for values in quantiles]
    yield Metric("coverage_error", *_pair(errors), lower=True)


def coverage(quantiles: Array, actual: Array) -> Floats:
    """Return for each sample and level the share of its true values that are at or below the quantile."""
    return np.stack([(actual <= quantiles[:, :, i]).mean(axis=1) for i in range(quantiles.shape[2])], axis=1)


def _regression_metrics(predicted: list[Array], actual: Array) -> Iterator[Metric]:
    absolute = [mean_by_sample(np.abs(values - actual)) for values in predicted]
    squares = [mean_by_sample((values - actual) ** 2) for values in predicted]
    by_absolute = _pair([-error for error in absolute])
    yield Metric("mae", *_pair([Mean(error) for error in absolute]), slices=by_absolute, lower=True)
    yield Metric("rmse", *_pair([RootMean(error) for error in squares]), slices=_pair(_root_parts(squares)), lower=True)
    if _constant(actual):
        reason = "all true values are equal"
        yield Metric("r2", None, None, why=reason)
        if actual.ndim == 1:
            yield Metric("spearman", None, None, why=reason)
        return
    explained = [1 - error / actual.var(axis=0, dtype=np.float64).mean() for error in squares]
    yield Metric("r2", *_pair([ExplainedVariance(error, actual) for error in squares]), slices=_pair(explained))
    if actual.ndim > 1:
        return
    names = ("candidate", "baseline")
    constant = next((name for name, values in zip(names, predicted, strict=False) if _constant(values)), None)
    if constant is None:
        yield Metric("spearman", *_pair([Spearman(values, actual) for values in predicted]))
    else:
        yield Metric("spearman", None, None, why=f"all values that the {constant} predicts are equal")


def _root_parts(squares: list[Floats]) -> list[Floats]:
    """Return a value per sample, the negative error, whose means differ by exactly the difference of the roots."""
    scale = sum(math.sqrt(error.mean()) for error in squares) / len(squares) or 1.0
    return [-(scale + error / scale) / 2 for error in squares]


def _ranking_metrics(queries: Array, predicted: list[Array], relevance: Array) -> Iterator[Metric]:
    by_model = [query_metrics(queries, scores, relevance) for scores in predicted]
    for name, missing in (("ndcg", "relevant"), ("mrr", "relevant"), ("auc", "relevant or no irrelevant")):
        defined = np.isfinite(by_model[0][name])  # depends on the relevance only, so it is the same for both models
        if not defined.any():
            yield Metric(name, None, None, "queries", why=f"every query has no {missing} item")
            continue
        omitted = int((~defined).sum())
        note = f"{name} omits {omitted} of {len(defined)} queries, which have no {missing} item" if omitted else ""
        yield Metric(
            name, *_pair([Mean(values[name][defined], (0.0, 1.0)) for values in by_model]), unit="queries", note=note
        )


def _classifier_auc(probabilities: list[Array], actual: Array, classes: Sequence[str]) -> Metric:
    """Return the AUC of the second of two classes; of more classes, the mean of each class against the rest."""
    class_indices = [1] if len(classes) == 2 else range(len(classes))
    present_classes = [i for i in class_indices if 0 < (actual == i).sum() < len(actual)]
    if not present_classes:
        return Metric("auc", None, None, why="the test set has samples of a single class")
    missing = [str(classes[i]) for i in class_indices if i not in present_classes]
    note = f"auc omits {', '.join(missing[:8])}: no sample of it in the test set" if missing else ""
    averages = [
        Average([Auc(rows[:, i].astype(np.float64), actual == i) for i in present_classes]) for rows in probabilities
    ]
    return Metric("auc", *_pair(averages), note=note)


def _pair(values: Sequence[_Value]) -> tuple[_Value, _Value | None]:
    """Return the value of the candidate and, if there is one, of the baseline."""
    return values[0], values[1] if len(values) > 1 else None


def _constant(values: Array) -> bool:
    return bool((values == values[0]).all())


def metric_values(metrics: Mapping[str, Metric], owner: Owner) -> dict[str, float]:
    """Return the defined values by name."""
    return {name: metric.value(owner) for name, metric in metrics.items() if metric.statistic(owner) is not None}


def query_metrics(queries: Array, scores: Floats, relevance: Floats) -> dict[str, Floats]:
    """Return one value per query and metric; NaN without a relevant item or, for auc, without an irrelevant one.

    Ties are not rewarded: ndcg and auc take the mean over all orders of tied items, mrr the worst.
    """
    lists = np.unique(queries, return_inverse=True)[1]
    order = np.lexsort((-scores, lists))
    query, gain = lists[order], relevance[order]
    ties = _tie_groups(query, scores[order])
    return {
        "ndcg": _ndcg(query, gain, ties, lists, relevance),
        "mrr": _mrr(query, gain > 0, ties),
        "auc": _auc(query, gain > 0, ties),
    }


def _tie_groups(query: Array, score: Floats) -> Array:
    """Return for each item of the ordered list the number of its group of equal scores."""
    is_new_group = np.concatenate([[True], (query[1:] != query[:-1]) | (score[1:] != score[:-1])])
    return np.cumsum(is_new_group) - 1


def _ranks(query: Array) -> Array:
    """Return the rank of each item in its query, from 0; the list is ordered by query."""
    starts = np.flatnonzero(np.concatenate([[True], query[1:] != query[:-1]]))
    return np.arange(len(query)) - np.repeat(starts, np.diff(starts, append=len(query)))


def _ndcg(query: Array, gain: Floats, ties: Array, lists: Array, relevance: Floats) -> Floats:
    discount = 1 / np.log2(_ranks(query) + 2)
    share = np.bincount(ties, weights=gain) / np.bincount(ties)
    gains = np.bincount(query, weights=share[ties] * discount)
    best = relevance[np.lexsort((-relevance, lists))]
    return ratio(gains, np.bincount(query, weights=best * discount))


def _mrr(query: Array, relevant: Array, ties: Array) -> Floats:
    """Reciprocal rank of the first relevant item, which is counted as the last of its ties."""
    size, hits = np.bincount(ties), np.bincount(ties, weights=relevant)
    first = np.unique(ties, return_index=True)[1]
    rank = _ranks(query)[first] + size - hits + 1
    best = np.full(query[-1] + 1, math.inf)
    np.minimum.at(best, query[first], np.where(hits > 0, rank, math.inf))
    return np.where(np.isfinite(best), 1 / best, math.nan)


def _auc(query: Array, relevant: Array, ties: Array) -> Floats:
    """Return the fraction of pairs of a relevant and an irrelevant item in the right order; ties count half."""
    first = np.unique(ties, return_index=True)[1]
    owner = query[first]
    hits = np.bincount(ties, weights=relevant)
    misses = np.bincount(ties) - hits
    misses_before = np.cumsum(misses) - misses  # irrelevant ones above, in this query and all before it
    of_query = np.bincount(query, weights=~relevant)
    misses_before -= (np.cumsum(of_query) - of_query)[owner]
    hits_in_order = np.bincount(owner, weights=hits * (of_query[owner] - misses_before - misses / 2))
    return ratio(hits_in_order, np.bincount(owner, weights=hits) * of_query)


Integers = np.ndarray[Any, Any]


def confusion(actual: Integers, predicted: Integers, count: int) -> Integers:
    """Return the confusion matrix: rows are true classes, columns predicted ones."""
    return np.bincount(actual * count + predicted, minlength=count * count).reshape(count, count)


def class_metrics(matrix: Integers, classes: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Return precision, recall and F1 of each class; None where the denominator is zero."""
    correct = np.diag(matrix)
    actual, predicted = matrix.sum(axis=1), matrix.sum(axis=0)
    pairs = ((correct, predicted), (correct, actual), (2 * correct, actual + predicted))
    precision, recall, f1 = (list(map(finite_or_none, ratio(*pair).tolist())) for pair in pairs)
    return {
        str(name): {"samples": int(actual[i]), "precision": precision[i], "recall": recall[i], "f1": f1[i]}
        for i, name in enumerate(classes)
    }
