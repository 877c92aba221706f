"""One run of the language model's graph, for a prompt and for the next token alike; the cache stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.spec.errors import BundleError
from pipeline.spec.generation import Generation
from pipeline.spec.signature import Signature
from serve.generate.cache import Block, empty, gathered, layers_of
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]


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
