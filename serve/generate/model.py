"""A language model as a version of a model holds it: its words, its graph and the engine that runs them.

A language model is loaded: its words are there, and a text is the same in company as it is alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError, InvalidPayload
from pipeline.contract.signature import Signature
from serve.generate.engine import Engine, Rules
from serve.generate.kv_cache import Block, Graph
from serve.generate.openai_api import Completion, Conversation
from serve.generate.openai_api import order as ordered
from serve.generate.sequence import Asking, Order, Writing
from serve.generate.tokenizer import Language
from serve.runtime.session import Session

MOST_TEXTS = 128  # of one request, whatever the bundle's limit
_AT_ONCE = 512  # characters and token ids of prompts that are read in less time than the way to a thread and back takes


@dataclass(frozen=True)
class Words:
    """What is loaded of it and proven."""

    language: Language
    graph: Graph
    why_alone: str  # why texts are written one by one; empty where they are written together


class Writer:
    def __init__(self, words: Words, bundle: Bundle, pool: Executor) -> None:
        signature: Signature = bundle.signature
        self.language, self._pool = words.language, pool
        self.engine = Engine(words.graph, _rules(signature, words.why_alone), pool)
        self.created = int(time.time())
        self.told = f"one by one: {words.why_alone}" if words.why_alone else "together"  # for the metadata
        self._most_texts = min(MOST_TEXTS, signature.limits.max_batch_size)

    async def prompts(self, asked: Completion | Conversation) -> list[list[int]]:
        """As token ids, all of them possible. Reading many words takes time that the loop has not."""
        count = len(asked.prompts) if isinstance(asked, Completion) else 1
        if count * asked.n > self._most_texts:
            raise InvalidPayload(f"n: {count} prompts times {asked.n} are more than {self._most_texts} texts")
        if isinstance(asked, Completion) and sum(map(len, asked.prompts)) <= _AT_ONCE:
            return self._read(asked)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, asked)

    def order(self, asked: Completion | Conversation, prompts: Sequence[Sequence[int]]) -> Order:
        """What fits in the model's positions, and in memory."""
        longest = max(map(len, prompts))
        most, word = self.language.generation.positions_limit, "prompt" if isinstance(asked, Completion) else "messages"
        if longest > most - (asked.most != 0):
            raise InvalidPayload(f"{word}: {longest} tokens; the model has {most} positions for them and its answer")
        order = ordered(asked, max(1, min(most, self.engine.longest) - longest))
        if longest + order.most > most:
            raise InvalidPayload(
                f"max_tokens: {longest} tokens of the prompt and {order.most} of the answer "
                f"are more than the model's {most} positions"
            )
        self.engine.check(longest + order.most)
        return order

    def writings(self, asking: Asking, prompts: Sequence[Sequence[int]], count: int) -> list[Writing]:
        """`count` of each prompt, in OpenAI's order."""
        end, decode = self.language.generation.end, self.language.text
        texts = [prompt for prompt in prompts for _ in range(count)]
        return [Writing(asking, index, prompt, end, decode) for index, prompt in enumerate(texts)]

    def _read(self, asked: Completion | Conversation) -> list[list[int]]:
        if isinstance(asked, Conversation):
            found = [self.language.conversation(asked.plain)]
        else:
            found = [self.language.prompt(one) if isinstance(one, str) else one for one in asked.prompts]
        for ids in found:
            if not ids:
                raise InvalidPayload("prompt: has no token, and the model needs one to begin with; give a text")
            if wrong := [one for one in ids if not 0 <= one < self.language.vocabulary]:
                raise InvalidPayload(
                    f"prompt: {wrong[0]} is no token id; the model knows those from 0 to {self.language.vocabulary - 1}"
                )
        return found


def _rules(signature: Signature, why_alone: str) -> Rules:
    limits = signature.limits
    return Rules(
        rows=1 if why_alone else signature.runtime.batch_rows,
        waiting=limits.max_waiting,
        cache_bytes=limits.max_cache_bytes,
    )


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
