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
        place = np.concatenate([np.arange(len(document)) for document in documents])  # of a token in its document
        counts = np.bincount(tokens, minlength=self.vocabulary)
        self._unigram = (counts + 1) / (counts.sum() + self.vocabulary)
        for length in range(1, self.order):
            known = np.flatnonzero(place >= length)
            contexts, rows = np.unique(self._key(tokens, known, length), return_inverse=True)
            shape = (len(contexts), self.vocabulary)
            table = sparse.csr_matrix((np.ones(len(known)), (rows, tokens[known])), shape=shape)
            table.sum_duplicates()
            self._tables.append((contexts, table))
        return self

    def with_order(self, order: int, discount: float) -> NGram:
        """Return a model with the same counts, a lower order and another discount."""
        found = NGram(order, self.vocabulary, discount)
        found._unigram, found._tables = self._unigram, self._tables[: order - 1]
        return found

    def log_probabilities(self, tokens: Array, place: Array) -> Array:
        """Return the log-probability of every token at each position; `place` is the position in the document."""
        found = np.tile(self._unigram, (len(tokens), 1))
        for length, (contexts, table) in enumerate(self._tables, start=1):
            where = np.flatnonzero(place >= length)
            keys = self._key(tokens, where, length)
            rows = np.searchsorted(contexts, keys).clip(max=len(contexts) - 1)
            seen = contexts[rows] == keys
            self._back_off(found, where[seen], table[rows[seen]])
        logs: Array = np.log(found)
        return logs

    def _back_off(self, found: Array, where: Array, counts: sparse.csr_matrix) -> None:
        total = np.asarray(counts.sum(axis=1)).reshape(-1, 1)
        kinds = np.diff(counts.indptr).reshape(-1, 1)
        counts.data -= self.discount
        found[where] = counts.toarray() / total + self.discount * kinds / total * found[where]

    def _key(self, tokens: Array, where: Array, length: int) -> Array:
        """Encode the tokens before each position as one number."""
        key = np.zeros(len(where), np.int64)
        for back in range(length, 0, -1):
            key = key * self.vocabulary + tokens[where - back]
        return key
