"""Keys and values of sequences that run together, and the ONNX graph that reads and extends them.

The cache of a batch is one rectangle per layer, padded on the left, and stays on the device between runs. A run reads
the old cache and writes a new one with one position more, and a sequence that joins copies the cache: for a moment it
exists twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from pipeline.contract.codec import Array
from pipeline.contract.signature import MAX_SCORES_BYTES, NUMPY_TYPES, SCORE_BYTES, Generation, Signature
from pipeline.system.errors import BundleError
from serve.runtime.session import Session


@dataclass(frozen=True)
class CacheLayer:
    """One cached tensor of the graph: the keys or the values of a layer."""

    input: str
    output: str
    heads: int
    width: int
    dtype: Any

    @property
    def position_bytes(self) -> int:
        return self.heads * self.width * int(np.dtype(self.dtype).itemsize)


def cache_layers(signature: Signature, generation: Generation) -> tuple[CacheLayer, ...]:
    """Return the cached tensors of the signature, each [batch, heads, past, width]."""
    layers = []
    for cache in generation.caches:
        spec = signature.input_specs[cache.input]
        heads, width = (spec.shape[1], spec.shape[3]) if len(spec.shape) == 4 else ("", "")
        if not isinstance(heads, int) or not isinstance(width, int) or spec.datatype not in ("FP32", "FP16"):
            raise BundleError(
                f"signature.json: cache {cache.input} is {spec.datatype} {list(spec.shape)}; "
                "expected FP32 or FP16 [batch, heads, past, width] with fixed heads and width; export again"
            )
        layers.append(CacheLayer(cache.input, cache.output, heads, width, NUMPY_TYPES[spec.datatype]))
    return tuple(layers)


@dataclass(frozen=True)
class CacheBudget:
    """The memory for keys and values."""

    position_bytes: int  # of one position of one row, in all layers
    max_bytes: int

    def bytes(self, sizes: Iterable[int]) -> int:
        """Return the bytes of caches with so many positions, padding included: one of them runs at a time."""
        positions = list(sizes)
        return (sum(positions) + max(positions, default=0)) * self.position_bytes

    @property
    def max_positions(self) -> int:
        """Positions of one sequence that fit while no other one runs."""
        return self.max_bytes // max(1, self.bytes([1]))


@dataclass(frozen=True)
class KVCache:
    """The cache of rows that run together. The first `pads[row]` of a row's `past` positions are padding."""

    pads: Array
    past: int
    values: tuple[Any, ...]  # an OrtValue for each layer, [rows, heads, past, width], on the model's device

    @property
    def rows(self) -> int:
        return len(self.pads)

    def mask(self, new: int) -> Array:
        """Return the attention mask of the cached positions and `new` more."""
        return (np.arange(self.past + new) >= self.pads[:, None]).astype(np.int64)

    def positions(self, new: int) -> Array:
        """Return the position ids of the next `new` tokens; those of padding do not matter."""
        return np.maximum(np.arange(self.past, self.past + new) - self.pads[:, None], 0)


def gather(layers: Sequence[CacheLayer], parts: Sequence[tuple[KVCache, Sequence[int]]], device: str) -> KVCache:
    """Copy these rows of these caches into one cache: joining and leaving cost one copy together."""
    lengths = np.concatenate([cache.past - cache.pads[list(rows)] for cache, rows in parts])
    past = int(lengths.max(initial=0))
    values = []
    for index, layer in enumerate(layers):
        gathered = np.zeros((len(lengths), layer.heads, past, layer.width), layer.dtype)
        start = 0
        for cache, rows in parts:
            shared = min(past, cache.past)
            if rows and shared:
                gathered[start : start + len(rows), :, past - shared :] = cache.values[index].numpy()[
                    list(rows), :, cache.past - shared :
                ]
            start += len(rows)
        values.append(to_device(gathered, device))
    return KVCache(past - lengths, past, tuple(values))


def to_device(array: Array, device: str) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)


class DecoderGraph:
    """The language model's graph: one run for a prompt or for the next tokens."""

    def __init__(self, session: Session, signature: Signature) -> None:
        self._session, self._generation = session, _validated_generation(signature)
        self.layers = cache_layers(signature, self._generation)
        self.position_bytes = sum(layer.position_bytes for layer in self.layers)
        self._score_bytes = SCORE_BYTES * self._generation.attention_heads
        self._outputs = [layer.output for layer in self.layers]

    def empty_cache(self, pads: list[int]) -> KVCache:
        values = [np.zeros((len(pads), layer.heads, 0, layer.width), layer.dtype) for layer in self.layers]
        return self.filled_cache(np.array(pads, np.int64), values)

    def filled_cache(self, pads: Array, values: Sequence[Array]) -> KVCache:
        """Return a cache with these arrays, each [rows, heads, past, width]."""
        return KVCache(pads, values[0].shape[2], tuple(to_device(value, self._session.device) for value in values))

    def gather(self, parts: list[tuple[KVCache, list[int]]]) -> KVCache:
        return gather(self.layers, parts, self._session.device)

    def affordable_width(self, rows: int, past: int, width: int) -> int:
        """Return how many of `width` positions one run may read, so that its attention scores fit into memory."""
        return max(1, min(width, MAX_SCORES_BYTES // (rows * (past + width) * self._score_bytes)))

    def run(self, cache: KVCache, ids: Array) -> tuple[Array, KVCache]:
        """Return logits [rows, sequence, vocabulary] for ids [rows, sequence], and the extended cache."""
        new, names = ids.shape[1], self._generation
        inputs = {names.ids: ids, names.mask: cache.mask(new), names.positions: cache.positions(new)}
        caches = dict(zip((layer.input for layer in self.layers), cache.values, strict=True))
        (logits,), values = self._session.keep({**inputs, **caches}, [names.logits], self._outputs)
        return logits, KVCache(cache.pads, cache.past + new, tuple(values))


def _validated_generation(signature: Signature) -> Generation:
    """Check that the tensors named in `generation` exist with the expected datatypes, and no input is left over."""
    generation = signature.generation
    assert generation is not None, "only for language models"
    outputs = {spec.name: spec for spec in signature.outputs}
    if absent := list(generation.missing_tensors(signature.input_specs, outputs)):
        raise BundleError(
            f"signature.json: generation names {', '.join(absent)}, which the model does not have; export again"
        )
    names = (generation.ids, generation.mask, generation.positions)
    if unfed := sorted(set(signature.input_specs) - {*names, *(cache.input for cache in generation.caches)}):
        raise BundleError(f"signature.json: generation does not name the input {', '.join(unfed)}; export again")
    datatypes = {name: signature.input_specs[name].datatype for name in names}
    wrong = [f"{name} is {datatype}, expected INT64" for name, datatype in datatypes.items() if datatype != "INT64"]
    if outputs[generation.logits].datatype != "FP32" or len(outputs[generation.logits].shape) != 3:
        wrong.append(f"{generation.logits} must be FP32 [batch, sequence, vocabulary]")
    if wrong:
        raise BundleError(f"signature.json: {'; '.join(wrong)}; export again")
    return generation


BLOCK_TOKENS = 16
_Key = tuple[int, tuple[int, ...]]  # number of the block before, 0 for none, and the block's tokens


@dataclass(frozen=True)
class Block:
    number: int  # unique, and never used again
    values: tuple[Array, ...]  # [heads, BLOCK_TOKENS, width] for each layer


class PrefixCache:
    """Keys and values of earlier prompts and answers, for requests that begin with the same tokens.

    They are kept in blocks. A block belongs to its tokens and to the block before it, so requests with a common
    beginning share its blocks. The least recently used ones are removed when other sequences need the memory. Used by
    one thread at a time: the event loop between two steps, the thread of a step within it.
    """

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
