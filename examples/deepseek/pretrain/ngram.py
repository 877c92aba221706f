"""The baseline: an n-gram model with back-off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse  # type: ignore[import-untyped]

Array = np.ndarray[Any, Any]


class NGram:
    """An n-gram model with absolute discounting, interpolated with shorter contexts."""

    def __init__(self, order: int, vocabulary: int, discount: float = 0.75) -> None:
        self.order, self.vocabulary, self.discount = order, vocabulary, discount
        self._unigram: Array = np.zeros(vocabulary)
        self._tables: list[tuple[Array, sparse.csr_matrix]] = []  # sorted contexts and their counts, shortest first

    def fit(self, documents: Sequence[Sequence[int]]) -> NGram:
        tokens = np.concatenate([np.asarray(document, np.int64) for document in documents])
        positions = np.concatenate([np.arange(len(document)) for document in documents])  # of a token in its document
        counts = np.bincount(tokens, minlength=self.vocabulary)
        self._unigram = (counts + 1) / (counts.sum() + self.vocabulary)
        for length in range(1, self.order):
            targets = np.flatnonzero(positions >= length)
            contexts, rows = np.unique(self._key(tokens, targets, length), return_inverse=True)
            shape = (len(contexts), self.vocabulary)
            table = sparse.csr_matrix((np.ones(len(targets)), (rows, tokens[targets])), shape=shape)
            table.sum_duplicates()
            self._tables.append((contexts, table))
        return self

    def with_order(self, order: int, discount: float) -> NGram:
        """Return a model with the same counts, a lower order and another discount."""
        model = NGram(order, self.vocabulary, discount)
        model._unigram, model._tables = self._unigram, self._tables[: order - 1]
        return model

    def log_probabilities(self, tokens: Array, positions: Array) -> Array:
        """Return the log-probability of every token at each position; `positions` are those in the document."""
        probabilities = np.tile(self._unigram, (len(tokens), 1))
        for length, (contexts, table) in enumerate(self._tables, start=1):
            rows_with_context = np.flatnonzero(positions >= length)
            keys = self._key(tokens, rows_with_context, length)
            rows = np.searchsorted(contexts, keys).clip(max=len(contexts) - 1)
            is_known = contexts[rows] == keys
            self._back_off(probabilities, rows_with_context[is_known], table[rows[is_known]])
        logs: Array = np.log(probabilities)
        return logs

    def _back_off(self, probabilities: Array, rows: Array, counts: sparse.csr_matrix) -> None:
        total = np.asarray(counts.sum(axis=1)).reshape(-1, 1)
        kinds = np.diff(counts.indptr).reshape(-1, 1)
        counts.data -= self.discount
        probabilities[rows] = counts.toarray() / total + self.discount * kinds / total * probabilities[rows]

    def _key(self, tokens: Array, rows: Array, length: int) -> Array:
        """Encode the tokens before each position as one number."""
        key = np.zeros(len(rows), np.int64)
        for back in range(length, 0, -1):
            key = key * self.vocabulary + tokens[rows - back]
        return key
