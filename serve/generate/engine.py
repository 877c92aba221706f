"""Continuous batching: sequences join the batch between two tokens and leave it as soon as they are finished.

The engine admits sequences as far as the cache's memory allows, reads their prompts (prefill) in parts between the
tokens of the others, and generates one token of each sequence per step (decoding). Every step runs in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from pipeline.contract.errors import InvalidPayload
from serve.errors import Busy, ClientDisconnected, DeadlineExceeded
from serve.generate.kv_cache import CacheBudget, DecoderGraph, KVCache
from serve.generate.sampling import TokenLogprob
from serve.generate.sequence import Chunk, TextSequence, prompt_logprobs
from serve.metrics import TokenMetrics

Array = np.ndarray[Any, Any]
Prompt = tuple[int, ...]
StepResults = list[tuple[TextSequence, Chunk | Exception]]
TimedResults = list[tuple[float, StepResults]]  # of several steps, each with its time

_MIN_FILL = 0.75  # of a prefill batch; the rest is padding, computed for nothing
_MAX_PREFILL_TOKENS = 2048  # of prompts that are read as one batch: the next ones wait for all of them
_SMOOTHING = 0.8  # weight of the past in the average time of a text

# Tokens generated without returning to the event loop while nothing waits for admission: the way to the loop and back
# takes as long as a good part of a small model's step. Limited, since other models may need the thread, and the loop
# has to notice clients that left.
_STEPS_PER_RUN, _RUN_SECONDS = 8, 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    sequences: int  # generated at the same time
    waiting: int  # requests in the queue
    cache_bytes: int  # for the keys and values of all sequences
    prefill_tokens: int = 512  # in one run, while no sequence is decoded
    prefill_tokens_while_decoding: int = 128  # between two tokens

    def prefill_part(self, reading: int, decoding: int) -> int:
        """Return the prompt tokens of one run: one sequence that is decoded does not delay many that are read."""
        if not decoding:
            return self.prefill_tokens
        return min(self.prefill_tokens, self.prefill_tokens_while_decoding * max(1, reading // decoding))


class Prefill:
    """Prompts that are read together, in parts. Each different prompt is a row, padded on the left to the longest."""

    def __init__(self, graph: DecoderGraph, sequences: Sequence[TextSequence]) -> None:
        self.sequences = [sequence for sequence in sequences if not sequence.group.closed]
        self._graph = graph
        self._prompts = list(dict.fromkeys(sequence.prompt for sequence in self.sequences))
        self.longest = max(map(len, self._prompts), default=0)
        pads = [self.longest - len(prompt) for prompt in self._prompts]
        rows = [[0] * pad + list(prompt) for pad, prompt in zip(pads, self._prompts, strict=True)]
        self._ids = np.array(rows, np.int64)
        self.cache: KVCache = graph.empty_cache(pads)
        self._last_logits: Array = np.zeros(0)
        self._logprobs: dict[Prompt, list[TokenLogprob | int]] = {prompt: [prompt[0]] for prompt in self._prompts}

    @property
    def done(self) -> bool:
        return self.cache.past >= self.longest

    def advance(self, tokens: int) -> None:
        """Read about so many more tokens, of all rows together."""
        start = self.cache.past
        ids = self._ids[:, start : start + max(1, tokens // len(self._ids))]
        logits, self.cache = self._graph.run(self.cache, ids)
        self._last_logits = logits[:, -1]
        for prompt, top in self._prompts_with_logprobs().items():
            self._add_logprobs(prompt, top, start, logits[self._prompts.index(prompt)])

    def next_logits(self, sequence: TextSequence) -> Array:
        """Return the logits of the first token after the prompt."""
        logits: Array = self._last_logits[self._prompts.index(sequence.prompt)]
        return logits

    def logprobs(self, sequence: TextSequence) -> list[TokenLogprob | int]:
        options = sequence.group.options
        return self._logprobs[sequence.prompt] if options.echo and options.top_logprobs is not None else []

    def rows(self, sequences: Iterable[TextSequence]) -> list[int]:
        return [self._prompts.index(sequence.prompt) for sequence in sequences]

    def _prompts_with_logprobs(self) -> dict[Prompt, int]:
        """Return the prompts whose log probabilities are requested, each with the largest number of alternatives."""
        prompts: dict[Prompt, int] = {}
        for sequence in self.sequences:
            options = sequence.group.options
            if options.echo and options.top_logprobs is not None:
                prompts[sequence.prompt] = max(options.top_logprobs, prompts.get(sequence.prompt, 0))
        return prompts

    def _add_logprobs(self, prompt: Prompt, top: int, first_column: int, logits: Array) -> None:
        """Add what these columns of logits say: each is about the token of the next column."""
        pad = self.longest - len(prompt)
        start, stop = max(first_column, pad), min(first_column + len(logits), self.longest - 1)
        if start < stop:
            next_tokens = prompt[start + 1 - pad : stop + 1 - pad]
            part = logits[start - first_column : stop - first_column]
            self._logprobs[prompt] += prompt_logprobs(part, next_tokens, top)


def prefill_batch_size(waiting: Iterable[TextSequence], max_tokens: int, max_sequences: int) -> int:
    """Return how many of the waiting sequences, from the first on, are worth reading as one batch."""
    prompts: set[Prompt] = set()
    count = longest = total = 0
    for sequence in islice(waiting, max_sequences):
        if sequence.prompt not in prompts:
            length = max(longest, len(sequence.prompt))
            tokens = length * (len(prompts) + 1)
            if prompts and (tokens > max_tokens or total + len(sequence.prompt) < _MIN_FILL * tokens):
                break
            prompts.add(sequence.prompt)
            longest, total = length, total + len(sequence.prompt)
        count += 1
    return count


@dataclass
class Batch:
    """The sequences that are decoded; row i of `cache` belongs to sequence i."""

    graph: DecoderGraph
    cache: KVCache | None = None
    sequences: tuple[TextSequence, ...] = ()

    def decode(self) -> StepResults:
        """Generate one token of each active sequence."""
        self._remove_inactive()
        if not self.sequences or self.cache is None:
            return []
        ids = np.array([[sequence.last_token] for sequence in self.sequences], np.int64)
        try:
            logits, self.cache = self.graph.run(self.cache, ids)
        except Exception as error:  # out of memory, or a failing model: the state of the cache is unknown
            failed, self.cache, self.sequences = self.sequences, None, ()
            return [(sequence, error) for sequence in failed]
        return [_extend(sequence, row) for sequence, row in zip(self.sequences, logits[:, -1], strict=True)]

    def read(self, prefill: Prefill, tokens: int) -> StepResults:
        """Read a part of the prompts; with the last part, generate the first tokens and join the batch."""
        try:
            prefill.advance(tokens)
        except Exception as error:  # as above, but only these sequences are affected
            return [(sequence, error) for sequence in prefill.sequences]
        if not prefill.done:
            return []
        results: StepResults = []
        for sequence in prefill.sequences:
            if (chunk := sequence.echo_prompt(prefill.logprobs(sequence))) is not None:
                results.append((sequence, chunk))
            if not sequence.finished:
                results.append(_extend(sequence, prefill.next_logits(sequence)))
        self._join(prefill)
        return results

    def _active_rows(self) -> list[int]:
        return [row for row, sequence in enumerate(self.sequences) if sequence.is_active]

    def _remove_inactive(self) -> None:
        """Copy the cache of the active sequences; without inactive ones nothing is copied."""
        rows = self._active_rows()
        if len(rows) == len(self.sequences):
            return
        self.sequences = tuple(self.sequences[row] for row in rows)
        self.cache = self.graph.gather([(self.cache, rows)]) if rows and self.cache else None

    def _join(self, prefill: Prefill) -> None:
        rows, joining = self._active_rows(), [sequence for sequence in prefill.sequences if sequence.is_active]
        parts: list[Any] = [(self.cache, rows)] if rows else []
        if joining:
            parts.append((prefill.cache, prefill.rows(joining)))
        self.sequences = (*(self.sequences[row] for row in rows), *joining)
        if len(parts) == 1 and not rows and prefill.rows(joining) == list(range(prefill.cache.rows)):
            self.cache = prefill.cache  # the same rows: no copy is needed
        else:
            self.cache = self.graph.gather(parts) if parts else None


def _extend(sequence: TextSequence, logits: Any) -> tuple[TextSequence, Chunk | Exception]:
    if sequence.group.closed:
        return sequence, Chunk(sequence.index)
    try:
        return sequence, sequence.extend(logits)
    except Exception as error:  # of this sequence only
        sequence.finished = True
        return sequence, error


class Engine:
    """Belongs to one event loop; the model runs in `pool`, one step after the other."""

    def __init__(
        self, graph: DecoderGraph, limits: EngineLimits, pool: Executor, metrics: TokenMetrics | None = None
    ) -> None:
        self.limits, self.metrics = limits, metrics or TokenMetrics()
        self.cache_budget = CacheBudget(graph.position_bytes, limits.cache_bytes)
        self._graph, self._pool, self._batch = graph, pool, Batch(graph)
        self._waiting: deque[TextSequence] = deque()
        self._prefill: Prefill | None = None
        self._task: asyncio.Task[None] | None = None
        self._text_seconds = 0.0  # average time of a text

    @property
    def running(self) -> int:
        return len(self._admitted())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def cache_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._required_bytes(self._admitted())

    @property
    def max_positions(self) -> int:
        """Positions of one sequence that fit in the cache's memory."""
        return self.limits.cache_bytes // max(1, self.cache_budget.bytes(1, 1))

    def check_fits(self, positions: int) -> None:
        """Raise InvalidPayload for a sequence that would never fit."""
        if not self.cache_budget.fits(1, positions):
            raise InvalidPayload(
                f"prompt and answer may take {positions} positions; the service has memory for {self.max_positions} "
                "of one text; ask for fewer tokens (max_tokens)"
            )

    def admit(self, sequences: int, deadline: float) -> None:
        """Raise Busy or DeadlineExceeded where the queue has no room."""
        if time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed before the first token")
        free = max(0, self.limits.sequences - self.running)  # requests of the same moment do not wait for each other
        if len({sequence.group for sequence in self._waiting}) >= self.limits.waiting + free:
            raise Busy(
                f"{self.waiting} texts already wait for memory or for their turn; try again in a moment",
                self._text_seconds * (1 + (self.waiting + sequences) / self.limits.sequences),
            )

    async def generate(self, sequences: Sequence[TextSequence]) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one group. Closing the generator removes its sequences from the batch."""
        group = sequences[0].group
        self.admit(len(sequences), group.request.deadline)
        self._waiting.extend(sequences)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        group.unfinished = unfinished = len(sequences)
        try:
            while unfinished:
                for chunk in await group.next_chunks():
                    unfinished -= bool(chunk.finish_reason)
                    yield chunk
        finally:
            group.closed = True

    async def _run(self) -> None:
        """Run steps until no sequence is left."""
        try:
            while self._remove_abandoned():
                self._start_prefill()
                if self._batch.sequences:
                    await self._step(functools.partial(self._decode, self._batch, asyncio.get_running_loop()))
                if self._prefill is not None:
                    await self._read(self._prefill)
        except Exception as error:  # a bug: clients must not wait for ever
            log.exception("text generation failed")
            self._fail_all(error)
        except asyncio.CancelledError:
            self._fail_all(Busy("the service is shutting down; try again"))
            raise
        finally:
            self._task = None

    def _fail_all(self, error: Exception) -> None:
        for sequence in (*self._admitted(), *self._waiting):
            sequence.group.fail(error)
        self._batch, self._prefill = Batch(self._graph), None

    def _remove_abandoned(self) -> bool:
        """Fail groups whose client is gone or whose deadline has passed. Return whether any sequence is left."""
        now = time.monotonic()
        for sequence in (*self._waiting, *self._admitted()):
            group = sequence.group
            if not group.closed and group.request.is_disconnected():
                group.fail(ClientDisconnected("the client disconnected before its text was complete"))
            if not group.closed and now >= group.request.deadline:
                group.fail(DeadlineExceeded("the deadline passed before the text was complete"))
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.group.closed)
        if self._prefill is not None and not _active(self._prefill.sequences):
            self._prefill = None
        return bool(self._waiting or self._prefill or self._batch.sequences)

    def _start_prefill(self) -> None:
        """Admit the next waiting sequences, as far as there is room."""
        if self._prefill is not None or not self._waiting:
            return
        decoding = _active(self._batch.sequences)
        admitted: list[TextSequence] = []
        free = self.limits.sequences - len(decoding)
        for _ in range(prefill_batch_size(self._waiting, _MAX_PREFILL_TOKENS, free)):
            if self._required_bytes([*decoding, *admitted, self._waiting[0]]) > self.limits.cache_bytes:
                break
            admitted.append(self._waiting.popleft())
        now = time.monotonic()
        for sequence in admitted:
            request = sequence.group.request
            request.run_started_at = request.run_started_at or now
        if admitted:
            self._prefill = Prefill(self._graph, admitted)
            self.metrics.tokens_in += sum(len(sequence.prompt) for sequence in admitted)

    async def _read(self, prefill: Prefill) -> None:
        batch = self._batch
        tokens = self.limits.prefill_part(len(prefill.sequences), len(_active(batch.sequences)))
        timed = await self._step(lambda: [(time.monotonic(), batch.read(prefill, tokens))])
        if prefill.done or any(results for _, results in timed):
            self._prefill = None

    def _decode(self, batch: Batch, loop: asyncio.AbstractEventLoop) -> TimedResults:
        """Run several steps in the thread. Streams get each token at once, the others at the end."""
        timed: TimedResults = []
        until = time.monotonic() + _RUN_SECONDS
        for _ in range(_STEPS_PER_RUN):
            results = batch.decode()
            timed.append((time.monotonic(), results))
            if not results or self._waiting or self._prefill is not None or timed[-1][0] >= until:
                break
            if not all(sequence.group.buffered for sequence, _ in results):
                loop.call_soon_threadsafe(self._deliver, timed)
                timed = []
        return timed

    async def _step(self, run: Callable[[], TimedResults]) -> TimedResults:
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, run)
        except RuntimeError:  # the pool is shut down
            self._fail_all(Busy("the service is shutting down; try again"))
            return []
        timed = await work
        self._deliver(timed)
        return timed

    def _deliver(self, timed: TimedResults) -> None:
        for now, results in timed:
            for sequence, result in results:
                self._deliver_one(sequence, result, now)

    def _deliver_one(self, sequence: TextSequence, result: Chunk | Exception, now: float) -> None:
        group = sequence.group
        if group.closed:
            return
        if isinstance(result, Exception):
            group.fail(result)
            return
        if result.tokens:
            self.metrics.record_token(now, group.request.received_at, sequence.last_token_at)
            sequence.last_token_at = now
        if result.finish_reason:
            seconds = now - group.request.run_started_at
            before = self._text_seconds
            self._text_seconds = _SMOOTHING * before + (1 - _SMOOTHING) * seconds if before else seconds
        group.put(result)

    def _admitted(self) -> list[TextSequence]:
        reading = self._prefill.sequences if self._prefill else []  # for a moment they are in the batch as well
        return list(dict.fromkeys(_active((*self._batch.sequences, *reading))))

    def _required_bytes(self, sequences: Sequence[TextSequence]) -> int:
        """Return the bytes at their final length, so that no sequence has to be evicted."""
        longest = max((sequence.max_positions for sequence in sequences), default=0)
        return self.cache_budget.bytes(len(sequences), longest)


def _active(sequences: Iterable[TextSequence]) -> list[TextSequence]:
    return [sequence for sequence in sequences if sequence.is_active]
