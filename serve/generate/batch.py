"""The continuous batch: who writes joins between two tokens and leaves at once; every step runs in a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.generate.cache import Block
from serve.generate.graph import Graph
from serve.generate.prefill import Prefill
from serve.generate.writing import Piece, Writing

Made = list[tuple[Writing, Piece | Exception]]


@dataclass
class Batch:
    """The rows of `block` belong to `writings`, in their order."""

    graph: Graph
    block: Block | None = None
    writings: tuple[Writing, ...] = ()

    def step(self) -> Made:
        """One more token for everybody who has not ended."""
        self._settle()
        if not self.writings or self.block is None:
            return []
        ids = np.array([[one.last] for one in self.writings], np.int64)
        try:
            logits, self.block = self.graph.run(self.block, ids)
        except Exception as error:  # memory, or a model that fails: nothing is known of anybody's cache now
            failed, self.block, self.writings = self.writings, None, ()
            return [(one, error) for one in failed]
        return [_extended(one, row) for one, row in zip(self.writings, logits[:, -1], strict=True)]

    def read(self, prefill: Prefill, tokens: int) -> Made:
        """A part of the prompts; with the last one they have their first token and are of the batch."""
        try:
            prefill.advance(tokens)
        except Exception as error:  # as above, for those alone
            return [(one, error) for one in prefill.writings]
        if not prefill.done:
            return []
        made: Made = []
        for one in prefill.writings:
            if (piece := one.introduce(prefill.told(one))) is not None:
                made.append((one, piece))
            if not one.ended:
                made.append(_extended(one, prefill.first(one)))
        self._join(prefill)
        return made

    def _settle(self) -> None:
        """Let go of those who have ended; of the others nothing is copied if there are none."""
        staying = [row for row, one in enumerate(self.writings) if _stays(one)]
        if len(staying) == len(self.writings):
            return
        self.writings = tuple(self.writings[row] for row in staying)
        self.block = self.graph.gathered([(self.block, staying)]) if staying and self.block else None

    def _join(self, prefill: Prefill) -> None:
        coming = [one for one in prefill.writings if _stays(one)]
        staying = [row for row, one in enumerate(self.writings) if _stays(one)]
        parts: list[Any] = [(self.block, staying)] if staying else []
        if coming:
            parts.append((prefill.block, prefill.rows(coming)))
        self.writings = (*(self.writings[row] for row in staying), *coming)
        if len(parts) == 1 and not staying and prefill.rows(coming) == list(range(prefill.block.rows)):
            self.block = prefill.block  # they are all there is, as they are
        else:
            self.block = self.graph.gathered(parts) if parts else None


def _stays(writing: Writing) -> bool:
    return not writing.ended and not writing.asking.over


def _extended(writing: Writing, logits: Any) -> tuple[Writing, Piece | Exception]:
    if writing.asking.over:
        return writing, Piece(writing.index)
    try:
        return writing, writing.extend(logits)
    except Exception as error:  # of one sequence alone
        writing.ended = True
        return writing, error
