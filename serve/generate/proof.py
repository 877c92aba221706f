"""A language model is loaded: its words are there, and a text is the same in company as it is alone."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import BundleError
from serve.generate.cache import Block
from serve.generate.graph import Graph
from serve.generate.language import Language
from serve.generate.writer import Words
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]

_PROMPT = 12  # tokens: enough for the mask to matter
_STEPS = 3

log = logging.getLogger(__name__)


def words_of(bundle: Bundle, session: Session) -> Words:
    """Whatever is wrong is raised here, before anybody asks for a text."""
    language, graph = Language.open(bundle), Graph(session, bundle.signature)
    try:
        why_alone = why_not_together(bundle, graph)
    except BundleError:
        raise
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        raise BundleError(
            f"{bundle.path}: the model cannot write a text: {' '.join(str(error).split())}; export again"
        ) from error
    if why_alone:
        log.warning("model=%s texts=one-by-one reason=%r", bundle.name, why_alone)
    return Words(language, graph, why_alone)


def why_not_together(bundle: Bundle, graph: Graph) -> str:
    """Empty where padding and strangers change no logits: then requests may share a batch."""
    generation, golden = bundle.signature.generation, bundle.golden()
    assert generation is not None, "asked of language models alone"
    if generation.positions_limit < _STEPS + 2:
        return "the model has too few positions to find out whether texts may be written together"
    known = golden.inputs[generation.ids][0].tolist()
    long = np.resize(known[::-1], min(_PROMPT, generation.positions_limit - _STEPS)).tolist()
    short = known[: max(1, len(long) // 2)]
    alone = _written(graph, [short])
    company = _written(graph, [short, long])
    for place, (one, other) in enumerate(zip(alone, company, strict=True)):
        if not np.allclose(one[0], other[0], rtol=golden.rtol, atol=golden.atol):
            apart = float(np.abs(one[0] - other[0]).max())
            return f"token {place} of a text has other logits in company than alone (by {apart:.3g})"
    return ""


def _written(graph: Graph, prompts: list[list[int]]) -> list[Array]:
    """The logits [rows, vocabulary] of some steps; each row goes on with its own likeliest token."""
    longest = max(map(len, prompts))
    pads = [longest - len(one) for one in prompts]
    ids = np.array([[0] * pad + one for pad, one in zip(pads, prompts, strict=True)], np.int64)
    block: Block = graph.empty(pads)
    found: list[Array] = []
    for _ in range(_STEPS):
        logits, block = graph.run(block, ids)
        found.append(logits[:, -1])
        ids = logits[:, -1].argmax(axis=1)[:, None]
    return found
