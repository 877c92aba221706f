"""Numbers that the report draws of the predictions on the test set: `figures.json`, of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipeline.contract.results import finite_or_none
from pipeline.statistics.metrics import query_metrics
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, PREDICTED, PROBABILITIES, QUERY, Array, Columns

_MAX_CURVES, _MAX_CURVE_POINTS = 10, 150  # of classes against the rest
_MAX_POINTS = 400  # of the samples, drawn at random
_RESIDUAL_BINS, _NDCG_BINS = 30, 10
_DECILES = 10
_WORST_QUERIES = 10


def figures_body(columns: Columns, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of figures.json; it is empty for a task without predicted(), or without probabilities()."""
    if ACTUAL not in columns or CANDIDATE + PREDICTED not in columns:
        return {}
    if classes is not None and CANDIDATE + PROBABILITIES in columns:
        curves = list(_classification_curves(columns, classes))
        return {"classification": {"classes": list(classes), "curves": curves}} if curves else {}
    if classes is not None:
        return {}
    if columns[ACTUAL].ndim > 1:  # drawn from metrics.json
        return {}
    if QUERY in columns:
        return {"ranking": _ranking_body(columns)}
    return {"regression": _regression_body(columns)}


def _classification_curves(columns: Columns, classes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the ROC and precision-recall curves of the second of two classes, or of each class against the rest."""
    actual = columns[ACTUAL]
    counts = np.bincount(actual, minlength=len(classes))
    present = [int(i) for i in np.argsort(-counts, kind="stable") if 0 < counts[i] < len(actual)]
    indices = [i for i in present if i == 1] if len(classes) == 2 else sorted(present[:_MAX_CURVES])
    for owner in (CANDIDATE, BASELINE) if len(classes) == 2 else (CANDIDATE,):
        if owner + PROBABILITIES not in columns:
            continue
        probabilities = columns[owner + PROBABILITIES]
        for i in indices:
            curve = _curve(probabilities[:, i], columns[owner + PREDICTED] == i, actual == i)
            yield {"class": str(classes[i]), "model": owner.rstrip("."), "positives": int(counts[i]), **curve}


def _curve(scores: Array, is_predicted: Array, is_positive: Array) -> dict[str, Any]:
    """Return the curves over all thresholds, and the point where the model decides."""
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(scores[order][1:] != scores[order][:-1], True))  # of samples with equal scores
    found, wrong = np.cumsum(is_positive[order])[last], np.cumsum(~is_positive[order])[last]
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    tpr, fpr, precision = found / positives, wrong / negatives, found / (found + wrong)
    x, y = np.append(0.0, fpr), np.append(0.0, tpr)
    chosen = int((is_predicted & is_positive).sum())
    taken = int(is_predicted.sum())
    return {
        "auc": float(((x[1:] - x[:-1]) * (y[1:] + y[:-1]) / 2).sum()),
        "average_precision": float((np.diff(y) * precision).sum()),
        "roc": _thinned(x, y, x + y),
        "pr": _thinned(tpr, precision, tpr),
        "decision": {
            "tpr": chosen / positives,
            "fpr": (taken - chosen) / negatives,
            "precision": chosen / taken if taken else None,
        },
    }


def _thinned(x: Array, y: Array, position: Array) -> list[list[float]]:
    """Return at most some hundred points, at even distances of an ascending position; the first and last are kept."""
    indices = np.searchsorted(position, np.linspace(position[0], position[-1], _MAX_CURVE_POINTS))
    unique = np.unique(np.append(indices.clip(max=len(x) - 1), [0, len(x) - 1]))
    points: list[list[float]] = np.stack([x[unique], y[unique]], axis=1).round(5).tolist()
    return points


def _regression_body(columns: Columns) -> dict[str, Any]:
    actual, predicted = columns[ACTUAL], columns[CANDIDATE + PREDICTED]
    finite = np.isfinite(predicted)
    baseline = columns.get(BASELINE + PREDICTED)
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(finite))[:_MAX_POINTS]
    return {
        "samples": len(actual),
        "not_finite": int((~finite).sum()),
        "points": np.stack([actual[chosen], predicted[chosen]], axis=1).tolist(),
        "residuals": _histogram((predicted - actual)[finite]),
        "deciles": _deciles(actual[finite], predicted[finite], None if baseline is None else baseline[finite]),
    }


def _histogram(residuals: Array) -> dict[str, Any] | None:
    """Return counts in bins of equal width; the outer bins have the residuals beyond them too."""
    if not len(residuals):
        return None
    low, high = np.quantile(residuals, (0.005, 0.995))
    pad = 0.0 if high > low else abs(high) * 0.01 or 1.0  # all are equal
    counts, edges = np.histogram(residuals.clip(low, high), _RESIDUAL_BINS, (low - pad, high + pad))
    beyond = int(((residuals < low) | (residuals > high)).sum())
    return {"low": edges[0], "high": edges[-1], "counts": counts.tolist(), "beyond": beyond, "mean": residuals.mean()}


def _deciles(actual: Array, predicted: Array, baseline: Array | None) -> list[dict[str, Any]]:
    """Return the errors of equal parts of the samples in the order of their true value."""
    order = np.argsort(actual, kind="stable")
    groups = [part for part in np.array_split(order, _DECILES) if len(part)]
    return [
        {
            "low": float(actual[part[0]]),
            "high": float(actual[part[-1]]),
            "samples": len(part),
            "mae": finite_or_none(np.abs(predicted[part] - actual[part]).mean()),
            "bias": finite_or_none((predicted[part] - actual[part]).mean()),
            "baseline_mae": None if baseline is None else finite_or_none(np.abs(baseline[part] - actual[part]).mean()),
        }
        for part in groups
    ]


def _ranking_body(columns: Columns) -> dict[str, Any]:
    queries, relevance = columns[QUERY], columns[ACTUAL]
    ids, place = np.unique(queries, return_inverse=True)
    ndcg = {owner: _ndcg(columns, owner) for owner in (CANDIDATE, BASELINE) if owner + PREDICTED in columns}
    candidate = ndcg[CANDIDATE]
    items, relevant = np.bincount(place), np.bincount(place, weights=relevance > 0)
    first_ranks = _first_relevant_ranks(place, columns[CANDIDATE + PREDICTED], relevance)
    order = np.argsort(candidate, kind="stable")
    worst = [int(i) for i in order[: min(_WORST_QUERIES, int(np.isfinite(candidate).sum()))]]  # NaN are the last
    return {
        "queries": len(ids),
        "without_relevant": int((relevant == 0).sum()),
        "histogram": {
            owner.rstrip("."): np.histogram(values[np.isfinite(values)], _NDCG_BINS, (0, 1))[0].tolist()
            for owner, values in ndcg.items()
        },
        "worst": [
            {
                "query": int(ids[i]),
                "ndcg": float(candidate[i]),
                "baseline": finite_or_none(ndcg[BASELINE][i]) if BASELINE in ndcg else None,
                "items": int(items[i]),
                "relevant": int(relevant[i]),
                "first_relevant_rank": int(first_ranks[i]),
            }
            for i in worst
        ],
    }


def _ndcg(columns: Columns, owner: str) -> Array:
    scores = columns[owner + PREDICTED]
    values: Array = query_metrics(columns[QUERY], scores, columns[ACTUAL])["ndcg"]
    if np.isfinite(scores).all():
        return values
    broken = np.unique(columns[QUERY][~np.isfinite(scores)])
    return np.where(np.isin(np.unique(columns[QUERY]), broken), np.nan, values)


def _first_relevant_ranks(place: Array, scores: Array, relevance: Array) -> Array:
    """Return the rank of each query's first relevant item, from 1; the last one of tied scores."""
    scores = np.nan_to_num(scores, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    best = np.full(place.max() + 1, -np.inf)
    np.maximum.at(best, place[relevance > 0], scores[relevance > 0])
    ranks: Array = np.bincount(place, weights=(scores >= best[place]) & (relevance <= 0)).astype(int) + 1
    return ranks
