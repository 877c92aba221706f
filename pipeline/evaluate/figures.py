"""Numbers that the report draws of a regressor's or a ranker's predictions: `figures.json`, of a bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.contract.statistics.metrics import query_metrics
from pipeline.contract.statistics.scores import ACTUAL, BASELINE, CANDIDATE, PREDICTED, QUERY, Array, Columns

_MAX_POINTS = 400  # of the samples, drawn at random
_RESIDUAL_BINS, _NDCG_BINS = 30, 10
_DECILES = 10
_WORST_QUERIES = 10


def figures_body(columns: Columns, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of figures.json; it is empty for a classifier, and for a task without predicted()."""
    if classes is not None or ACTUAL not in columns or CANDIDATE + PREDICTED not in columns:
        return {}
    if QUERY in columns:
        return {"ranking": _ranking_body(columns)}
    return {"regression": _regression_body(columns)}


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
            "mae": _mean(np.abs(predicted[part] - actual[part])),
            "bias": _mean(predicted[part] - actual[part]),
            "baseline_mae": None if baseline is None else _mean(np.abs(baseline[part] - actual[part])),
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
                "baseline": float(ndcg[BASELINE][i]) if BASELINE in ndcg and np.isfinite(ndcg[BASELINE][i]) else None,
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
    best = np.full(place.max() + 1, -np.inf)
    np.maximum.at(best, place[relevance > 0], scores[relevance > 0])
    ranks: Array = np.bincount(place, weights=(scores >= best[place]) & (relevance <= 0)).astype(int) + 1
    return ranks


def _mean(values: Array) -> float | None:
    mean = float(values.mean())
    return mean if np.isfinite(mean) else None
