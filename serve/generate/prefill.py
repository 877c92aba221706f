"""Prompts that are read together, a part at a time, so that those who write meanwhile are not kept waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from serve.generate.kv_cache import Block, Graph
from serve.generate.sampling import Likelihood
from serve.generate.sequence import Writing, prompt_likelihoods

Array = np.ndarray[Any, Any]
Prompt = tuple[int, ...]

_FILL = 0.75  # at least, of what prompts take that are read together: the rest is padding, computed in vain


class Prefill:
    """Each different prompt is a row, padded on the left to the longest."""

    def __init__(self, graph: Graph, writings: Sequence[Writing]) -> None:
        self.writings = [one for one in writings if not one.asking.over]
        self._graph = graph
        self._prompts = list(dict.fromkeys(one.prompt for one in self.writings))
        self.longest = max(map(len, self._prompts), default=0)
        pads = [self.longest - len(prompt) for prompt in self._prompts]
        self._ids = np.array([[0] * pad + list(one) for pad, one in zip(pads, self._prompts, strict=True)], np.int64)
        self.block: Block = graph.empty(pads)
        self._logits: Array = np.zeros(0)
        self._told: dict[Prompt, list[Likelihood | int]] = {prompt: [prompt[0]] for prompt in self._prompts}

    @property
    def done(self) -> bool:
        return self.block.past >= self.longest

    def advance(self, tokens: int) -> None:
        """Read about so many more, of all rows together."""
        began = self.block.past
        ids = self._ids[:, began : began + max(1, tokens // len(self._ids))]
        logits, self.block = self._graph.run(self.block, ids)
        self._logits = logits[:, -1]
        for prompt, top in self._telling().items():
            self._tell(prompt, top, began, logits[self._prompts.index(prompt)])

    def first(self, writing: Writing) -> Array:
        """The logits of its first token."""
        found: Array = self._logits[self._prompts.index(writing.prompt)]
        return found

    def told(self, writing: Writing) -> list[Likelihood | int]:
        order = writing.asking.order
        return self._told[writing.prompt] if order.echo and order.top is not None else []

    def rows(self, writings: Iterable[Writing]) -> list[int]:
        return [self._prompts.index(one.prompt) for one in writings]

    def _telling(self) -> dict[Prompt, int]:
        """Prompts whose own likelihoods are asked for, and the most likeliest tokens anybody wants of each."""
        found: dict[Prompt, int] = {}
        for one in self.writings:
            order = one.asking.order
            if order.echo and order.top is not None:
                found[one.prompt] = max(order.top, found.get(one.prompt, 0))
        return found

    def _tell(self, prompt: Prompt, top: int, began: int, logits: Array) -> None:
        """`logits` are of the columns from `began` on; the column of a token tells of the next one."""
        pad = self.longest - len(prompt)
        start, stop = max(began, pad), min(began + len(logits), self.longest - 1)
        if start < stop:
            following = prompt[start + 1 - pad : stop + 1 - pad]
            self._told[prompt] += prompt_likelihoods(logits[start - began : stop - began], following, top)


def together(waiting: Iterable[Writing], most_tokens: int, most_rows: int) -> int:
    """How many of those that wait, from the first on, are worth reading at once."""
    prompts: set[Prompt] = set()
    count = longest = total = 0
    for writing in islice(waiting, most_rows):
        if writing.prompt not in prompts:
            length = max(longest, len(writing.prompt))
            tokens = length * (len(prompts) + 1)
            if prompts and (tokens > most_tokens or total + len(writing.prompt) < _FILL * tokens):
                break
            prompts.add(writing.prompt)
            longest, total = length, total + len(writing.prompt)
        count += 1
    return count
