"""A language model as a version of a model holds it: its words, its graph and the engine that runs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import Signature
from serve.generate.engine import Engine, Rules
from serve.generate.graph import Graph
from serve.generate.language import Language
from serve.generate.request import Completion, Conversation
from serve.generate.request import order as ordered
from serve.generate.writing import Asking, Order, Writing

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
