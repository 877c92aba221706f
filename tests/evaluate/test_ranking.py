from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import ndcg_score, roc_auc_score

from evaluate.ranking import per_query


def test_each_query_is_what_scikit_learn_says_ties_and_all() -> None:
    generator = np.random.default_rng(0)
    queries = np.repeat(np.arange(30), generator.integers(4, 12, size=30))
    scores = np.round(generator.normal(size=len(queries)), 1)
    relevance = generator.integers(0, 3, size=len(queries)).astype(np.float64)
    shuffled = generator.permutation(len(queries))
    found = per_query(queries[shuffled], scores[shuffled], relevance[shuffled])
    for query in range(30):
        own = queries == query
        ndcg = ndcg_score(relevance[None, own], scores[None, own]) if relevance[own].any() else np.nan
        assert found["ndcg"][query] == pytest.approx(ndcg, nan_ok=True)
        both = len(set(relevance[own] > 0)) == 2
        auc = roc_auc_score(relevance[own] > 0, scores[own]) if both else np.nan
        assert found["auc"][query] == pytest.approx(auc, nan_ok=True)


def test_the_first_relevant_item_counts_and_is_last_among_its_equals() -> None:
    queries = np.array([7, 7, 7, 9, 9, 9, 9])
    scores = np.array([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    relevance = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert per_query(queries, scores, relevance)["mrr"].tolist() == [1 / 2, 1 / 3]


def test_a_constant_score_earns_nothing() -> None:
    found = per_query(np.zeros(4, np.int64), np.ones(4), np.array([1.0, 0, 0, 0]))
    assert found["mrr"].tolist() == [1 / 4]
    assert found["auc"].tolist() == [0.5]


def test_a_query_without_a_relevant_item_has_no_value() -> None:
    found = per_query(np.array([1, 1, 2, 2]), np.arange(4.0), np.array([0.0, 0, 1, 1]))
    assert np.isnan(found["ndcg"]).tolist() == np.isnan(found["mrr"]).tolist() == [True, False]
    assert np.isnan(found["auc"]).all(), "nor, for auc, one without an irrelevant item"
