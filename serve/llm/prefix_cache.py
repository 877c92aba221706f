"""Keys and values of earlier prompts and answers, for requests that begin with the same tokens.

They are kept in blocks. A block belongs to its tokens and to the block before it, so requests with a common beginning
share its blocks. The least recently used ones are removed when other sequences need the memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.llm.kv_cache import CacheLayer, KVCache

Array = np.ndarray[Any, Any]

BLOCK_TOKENS = 16
_Key = tuple[int, tuple[int, ...]]  # number of the block before, 0 for none, and the block's tokens


@dataclass(frozen=True)
class Block:
    number: int  # unique, and never used again
    values: tuple[Array, ...]  # [heads, BLOCK_TOKENS, width] for each layer


class PrefixCache:
    """Used by one thread at a time: the event loop between two steps, the thread of a step within it."""

    def __init__(self, layers: Sequence[CacheLayer]) -> None:
        self._layers = layers
        self._block_bytes = BLOCK_TOKENS * sum(layer.position_bytes for layer in layers)
        self._blocks: OrderedDict[_Key, Block] = OrderedDict()  # least recently used first
        self._capacity = 0  # blocks
        self._last_number = 0

    @property
    def bytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    def limit(self, max_bytes: int) -> None:
        """Remove the least recently used blocks beyond this memory, and keep within it from now on."""
        self._capacity = max(0, max_bytes) // max(1, self._block_bytes)
        self._remove(self._capacity)

    def find(self, tokens: Sequence[int]) -> list[Block]:
        """Return the blocks of the beginning; at least one token is left, whose logits are needed."""
        keys = self._stored_keys(tokens[:-1])
        self._touch(keys)
        return [self._blocks[key] for key in keys]

    def store(self, tokens: Sequence[int], cache: KVCache, row: int) -> None:
        """Copy the blocks of a row that are not stored yet; its first position belongs to the first token."""
        stored = self._stored_keys(tokens)
        count = min(len(tokens) // BLOCK_TOKENS, self._capacity)
        self._touch(stored)
        self._remove(self._capacity - max(0, count - len(stored)))  # never one of `stored`, which were just used
        keys = stored[:]
        for index in range(len(stored), count):
            key = (self._blocks[keys[-1]].number if keys else 0, _block_tokens(tokens, index))
            start = int(cache.pads[row]) + index * BLOCK_TOKENS
            values = (value.numpy()[row, :, start : start + BLOCK_TOKENS].copy() for value in cache.values)
            self._last_number += 1
            self._blocks[key] = Block(self._last_number, tuple(values))
            keys.append(key)
        self._touch(keys)

    def _stored_keys(self, tokens: Sequence[int]) -> list[_Key]:
        keys: list[_Key] = []
        number = 0
        for index in range(len(tokens) // BLOCK_TOKENS):
            key = (number, _block_tokens(tokens, index))
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            number = block.number
        return keys

    def _touch(self, keys: Sequence[_Key]) -> None:
        """Mark as used, the first block last: so a block is never removed before those that follow it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _remove(self, keep: int) -> None:
        while len(self._blocks) > max(0, keep):
            self._blocks.popitem(last=False)


def _block_tokens(tokens: Sequence[int], index: int) -> tuple[int, ...]:
    return tuple(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])


def copy_blocks(layers: Sequence[CacheLayer], rows: Sequence[Sequence[Block]], pads: Array, past: int) -> list[Array]:
    """Return [rows, heads, past, width] for each layer; each row's blocks begin after its padding, cut at `past`."""
    values = []
    for index, layer in enumerate(layers):
        copied = np.zeros((len(rows), layer.heads, past, layer.width), layer.dtype)
        for row, blocks in enumerate(rows):
            for number, block in enumerate(blocks):
                start = int(pads[row]) + number * BLOCK_TOKENS
                size = min(BLOCK_TOKENS, past - start)
                if size > 0:
                    copied[row, :, start : start + size] = block.values[index][:, :size]
        values.append(copied)
    return values
