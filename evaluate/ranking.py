"""How well each query's list is ordered: ndcg, mrr and auc per query, vectorised over all of them."""

from __future__ import annotations

import math

import numpy as np

from evaluate.columns import Array
from pipeline.spec.statistics.interval import Floats


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
