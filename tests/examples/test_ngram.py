from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .conftest import Module

A, B, C, D = range(4)


@pytest.fixture
def counted(pretrain_module: Module) -> Any:
    """A trigram model of two documents: a b a b a c, and b d."""
    return pretrain_module("ngram").NGram(3, 4, discount=0.5).fit([[A, B, A, B, A, C], [B, D]])


def odds(model: Any, *tokens: int) -> Any:
    """Return the probabilities of the next token."""
    found = model.log_probabilities(np.array([*tokens, A]), np.arange(len(tokens) + 1))
    return np.exp(found[-1])


def test_unigram_probabilities_are_smoothed_frequencies(counted: Any) -> None:
    assert odds(counted) == pytest.approx(np.array([3 + 1, 3 + 1, 1 + 1, 1 + 1]) / 12)


def test_seen_context_is_interpolated_with_the_shorter_one(counted: Any) -> None:
    one = odds(counted)
    after_b = (np.array([2 - 0.5, 0, 0, 1 - 0.5]) + 0.5 * 2 * one) / 3  # b was followed by a, a, d
    assert odds(counted, B) == pytest.approx(after_b)
    after_a = (np.array([0, 2 - 0.5, 1 - 0.5, 0]) + 0.5 * 2 * one) / 3  # a by b, b, c
    assert odds(counted, B, A) == pytest.approx((np.array([0, 1 - 0.5, 1 - 0.5, 0]) + 0.5 * 2 * after_a) / 2)


def test_unseen_context_backs_off_to_the_shorter_one(counted: Any) -> None:
    assert odds(counted, D, B) == pytest.approx(odds(counted, B))
    assert odds(counted, D) == pytest.approx(odds(counted))


def test_every_distribution_sums_to_one(counted: Any) -> None:
    rows = np.array([A, B, C, D, A, B, A, B, A])
    found = np.exp(counted.log_probabilities(rows, np.arange(9)))
    assert found.sum(axis=1) == pytest.approx(np.ones(9))
    assert (found > 0).all()


def test_context_does_not_cross_documents(counted: Any) -> None:
    together = counted.log_probabilities(np.array([B, A, A, C]), np.array([0, 1, 0, 1]))
    alone = counted.log_probabilities(np.array([A, C]), np.array([0, 1]))
    assert together[2:] == pytest.approx(alone)


def test_order_and_discount_can_be_changed_without_recounting(counted: Any, pretrain_module: Module) -> None:
    documents = [[A, B, A, B, A, C], [B, D]]
    for order, discount in ((1, 0.5), (2, 0.9), (3, 0.7)):
        anew = pretrain_module("ngram").NGram(order, 4, discount).fit(documents)
        assert odds(counted.with_order(order, discount), B, A) == pytest.approx(odds(anew, B, A))
    assert odds(counted, B, A) == pytest.approx(odds(counted.with_order(3, 0.5), B, A)), "and they stay as they were"
