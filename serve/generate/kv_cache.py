"""Keys and values of texts that run together: one rectangle a layer, padded on the left, within so many bytes.

One run of the language model's graph, for a prompt and for the next token alike; the cache stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from pipeline.contract.errors import BundleError
from pipeline.contract.signature import NUMPY_TYPES, Generation, Signature
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]

# A run reads the old positions and writes them anew with one more, and whoever joins is copied to the others' place:
# for a moment all of it is there twice.
_COPIES = 2


@dataclass(frozen=True)
class Layer:
    """One tensor that the graph keeps of every position."""

    input: str
    output: str
    heads: int
    width: int
    kind: Any  # numpy's

    @property
    def position_bytes(self) -> int:
        return self.heads * self.width * int(np.dtype(self.kind).itemsize)


def layers_of(signature: Signature, generation: Generation) -> tuple[Layer, ...]:
    """As the signature describes them: [batch, heads, past, width]."""
    found = []
    for cache in generation.caches:
        spec = signature.input_specs[cache.input]
        heads, width = (spec.shape[1], spec.shape[3]) if len(spec.shape) == 4 else ("", "")
        if not isinstance(heads, int) or not isinstance(width, int) or spec.datatype not in ("FP32", "FP16"):
            raise BundleError(
                f"signature.json: cache {cache.input} is {spec.datatype} {list(spec.shape)}; "
                "expected FP32 or FP16 [batch, heads, past, width] with a number of heads and a width; export again"
            )
        found.append(Layer(cache.input, cache.output, heads, width, NUMPY_TYPES[spec.datatype]))
    return tuple(found)


@dataclass(frozen=True)
class Room:
    """Memory for keys and values."""

    position_bytes: int  # of one position of one row, in all layers
    most_bytes: int

    def bytes(self, rows: int, positions: int) -> int:
        """That rows of up to so many positions take: all are as long as the longest."""
        return _COPIES * rows * positions * self.position_bytes

    def fits(self, rows: int, positions: int) -> bool:
        return self.bytes(rows, positions) <= self.most_bytes


@dataclass(frozen=True)
class Block:
    """Rows that run together. The first `pads[row]` of the `past` positions of a row are nobody's."""

    pads: Array
    past: int
    values: tuple[Any, ...]  # an OrtValue for each layer, [rows, heads, past, width], where the model runs

    @property
    def rows(self) -> int:
        return len(self.pads)

    def mask(self, more: int) -> Array:
        """Of the positions there are and so many more."""
        return (np.arange(self.past + more) >= self.pads[:, None]).astype(np.int64)

    def positions(self, more: int) -> Array:
        """The places of the next tokens in their texts; those of padding do not matter."""
        return np.maximum(np.arange(self.past, self.past + more) - self.pads[:, None], 0)


def empty(layers: Sequence[Layer], pads: Sequence[int], device: str) -> Block:
    """Rows of which no position was computed."""
    values = (np.zeros((len(pads), one.heads, 0, one.width), one.kind) for one in layers)
    return Block(np.array(pads, np.int64), 0, tuple(placed(value, device) for value in values))


def gathered(layers: Sequence[Layer], parts: Sequence[tuple[Block, Sequence[int]]], device: str) -> Block:
    """These rows of these blocks as one block: the one copy that joining and leaving cost, both together."""
    lengths = np.concatenate([block.past - block.pads[list(rows)] for block, rows in parts])
    past = int(lengths.max(initial=0))
    values = []
    for place, layer in enumerate(layers):
        whole = np.zeros((len(lengths), layer.heads, past, layer.width), layer.kind)
        at = 0
        for block, rows in parts:
            shared = min(past, block.past)
            if rows and shared:
                whole[at : at + len(rows), :, past - shared :] = block.values[place].numpy()[
                    list(rows), :, block.past - shared :
                ]
            at += len(rows)
        values.append(placed(whole, device))
    return Block(past - lengths, past, tuple(values))


def placed(array: Array, device: str) -> Any:
    return onnxruntime.OrtValue.ortvalue_from_numpy(array, device, 0)


class Graph:
    def __init__(self, session: Session, signature: Signature) -> None:
        self._session, self._generation = session, _generation(signature)
        self.layers = layers_of(signature, self._generation)
        self.position_bytes = sum(layer.position_bytes for layer in self.layers)
        self._outputs = [layer.output for layer in self.layers]

    def empty(self, pads: list[int]) -> Block:
        return empty(self.layers, pads, self._session.device)

    def gathered(self, parts: list[tuple[Block, list[int]]]) -> Block:
        return gathered(self.layers, parts, self._session.device)

    def run(self, block: Block, ids: Array) -> tuple[Array, Block]:
        """Logits [rows, sequence, vocabulary] for ids [rows, sequence], and the block with them in it."""
        more, names = ids.shape[1], self._generation
        inputs = {names.ids: ids, names.mask: block.mask(more), names.positions: block.positions(more)}
        caches = dict(zip((layer.input for layer in self.layers), block.values, strict=True))
        (logits,), kept = self._session.keep({**inputs, **caches}, [names.logits], self._outputs)
        return logits, Block(block.pads, block.past + more, tuple(kept))


def _generation(signature: Signature) -> Generation:
    """Every tensor it names is there, of the datatype that is agreed."""
    found = signature.generation
    assert found is not None, "asked of language models alone"
    outputs = {spec.name: spec for spec in signature.outputs}
    if absent := list(found.absent(signature.input_specs, outputs)):
        raise BundleError(
            f"signature.json: generation names {', '.join(absent)}, which the model has not; export again"
        )
    if unfed := sorted(
        set(signature.input_specs) - {found.ids, found.mask, found.positions, *(one.input for one in found.caches)}
    ):
        raise BundleError(f"signature.json: generation says nothing of the input {', '.join(unfed)}; export again")
    texts = {name: signature.input_specs[name].datatype for name in (found.ids, found.mask, found.positions)}
    wrong = [f"{name} is {kind}, expected INT64" for name, kind in texts.items() if kind != "INT64"]
    if outputs[found.logits].datatype != "FP32" or len(outputs[found.logits].shape) != 3:
        wrong.append(f"{found.logits} is no FP32 [batch, sequence, vocabulary]")
    if wrong:
        raise BundleError(f"signature.json: {'; '.join(wrong)}; export again")
    return found
