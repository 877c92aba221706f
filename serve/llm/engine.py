"""Continuous batching: sequences join the batch between two tokens and leave it as soon as they are finished.

The engine admits sequences as far as the cache's memory allows, reads their prompts (prefill) in parts between the
tokens of the others, and generates one token of each sequence per step (decoding). Every step runs in a thread.

Memory is used as texts grow. Where it runs out, the youngest sequence is preempted: its cache is freed, it waits, and
its prompt and answer are read again. Memory that no sequence needs keeps the beginnings of earlier texts.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from pipeline.contract.codec import Array
from pipeline.system.errors import InvalidPayload
from serve.errors import Busy, ClientDisconnected, DeadlineExceeded
from serve.llm.kv_cache import BLOCK_TOKENS, CacheBudget, DecoderGraph, KVCache, PrefixCache, copy_blocks
from serve.llm.sampling import TokenLogprob
from serve.llm.sequence import Chunk, TextSequence, prompt_logprobs
from serve.monitoring.metrics import TokenMetrics

Tokens = tuple[int, ...]
StepResults = list[tuple[TextSequence, Chunk | Exception]]
TimedResults = list[tuple[float, StepResults]]  # of several steps, each with its time

_MIN_FILL = 0.75  # of a prefill batch; the rest is padding, computed for nothing
_MAX_PREFILL_TOKENS = 2048  # of prompts that are read as one batch: the next ones wait for all of them
_MIN_LENGTH = 0.5  # of a text, of the longest in its batch, where memory is short; the rest is padding
_SMOOTHING = 0.8  # weight of the past in the average time of a text

# Tokens generated without returning to the event loop while nothing waits for admission: the way to the loop and back
# takes as long as a good part of a small model's step. Limited, since other models may need the thread, and the loop
# has to notice clients that left.
_STEPS_PER_RUN, _RUN_SECONDS = 8, 0.05

_ROOM_SHARE = 0.25  # of the longest text: room for at least so many tokens, as `room_tokens` below

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    sequences: int  # generated at the same time
    waiting: int  # requests in the queue
    cache_bytes: int  # for the keys and values of all sequences
    prefill_tokens: int = 512  # in one run, while no sequence is decoded
    prefill_tokens_while_decoding: int = 128  # between two tokens
    room_tokens: int = 64  # that fit when a sequence is admitted: else it would soon be preempted, and read again

    def prefill_part(self, reading: int, decoding: int) -> int:
        """Return the prompt tokens of one run: one sequence that is decoded does not delay many that are read."""
        if not decoding:
            return self.prefill_tokens
        return min(self.prefill_tokens, self.prefill_tokens_while_decoding * max(1, reading // decoding))


class Prefill:
    """Texts that are read together, in parts. Each different text is a row, padded on the left to the longest.

    A text is a prompt, or the prompt and answer of a sequence that was preempted.
    """

    def __init__(self, batch: Batch, sequences: Sequence[TextSequence]) -> None:
        """The sequences will join `batch`."""
        self.batch = batch
        self.sequences = [sequence for sequence in sequences if not sequence.group.closed]
        texts = [tuple(sequence.tokens) for sequence in self.sequences]
        self._texts = list(dict.fromkeys(texts))
        self._rows = {sequence: self._texts.index(text) for sequence, text in zip(self.sequences, texts, strict=True)}
        self.longest = max(map(len, self._texts), default=0)
        self._pads = np.array([self.longest - len(text) for text in self._texts], np.int64)
        self._ids = np.array(
            [[0] * pad + list(text) for pad, text in zip(self._pads, self._texts, strict=True)], np.int64
        )
        self._tops = self._requested_logprobs()
        self._blocks = [[] if text in self._tops else batch.prefix.find(text) for text in self._texts]
        filled = [pad + len(blocks) * BLOCK_TOKENS for pad, blocks in zip(self._pads, self._blocks, strict=True)]
        self._start = int(min(filled, default=0))  # all rows are read from this column on
        self.cache: KVCache | None = None
        self._last_logits: Array = np.zeros(0)
        self._logprobs: dict[Tokens, list[TokenLogprob | int]] = {text: [text[0]] for text in self._texts}
        for sequence in self.sequences:
            if not sequence.generated:
                sequence.cached_tokens = max(0, self._start - int(self._pads[self._rows[sequence]]))

    @property
    def done(self) -> bool:
        return self.cache is not None and self.cache.past >= self.longest

    def advance(self, tokens: int) -> None:
        """Read about so many more tokens, of all rows together."""
        cache = self.cache or self._first_cache()
        rows = len(self._ids)
        width = self.batch.graph.affordable_width(rows, cache.past, max(1, tokens // rows))
        ids = self._ids[:, cache.past : cache.past + width]
        logits, self.cache = self.batch.graph.run(cache, ids)
        self._last_logits = logits[:, -1]
        for text, top in self._tops.items():
            self._add_logprobs(text, top, cache.past, logits[self._texts.index(text)])

    def next_logits(self, sequence: TextSequence) -> Array:
        """Return the logits of the first token after the text."""
        logits: Array = self._last_logits[self._rows[sequence]]
        return logits

    def logprobs(self, sequence: TextSequence) -> list[TokenLogprob | int]:
        return self._logprobs[self._texts[self._rows[sequence]]] if sequence.needs_prompt_logits else []

    def rows(self, sequences: Iterable[TextSequence]) -> list[int]:
        return [self._rows[sequence] for sequence in sequences]

    def store_prefixes(self) -> None:
        failed = set(self.rows(sequence for sequence in self.sequences if sequence.failed))
        for row, text in enumerate(self._texts):
            if self.cache is not None and row not in failed:
                self.batch.prefix.store(text, self.cache, row)

    def _first_cache(self) -> KVCache:
        graph = self.batch.graph
        values = copy_blocks(graph.layers, self._blocks, self._pads, self._start)
        self._blocks = []  # their memory may be needed
        return graph.filled_cache(self._pads, values)

    def _requested_logprobs(self) -> dict[Tokens, int]:
        """Return the prompts whose log probabilities are requested, each with the largest number of alternatives."""
        tops: dict[Tokens, int] = {}
        for sequence in self.sequences:
            if sequence.needs_prompt_logits:
                text = self._texts[self._rows[sequence]]
                tops[text] = max(sequence.group.options.top_logprobs or 0, tops.get(text, 0))
        return tops

    def _add_logprobs(self, text: Tokens, top: int, first_column: int, logits: Array) -> None:
        """Add what these columns of logits say: each is about the token of the next column."""
        pad = self.longest - len(text)
        start, stop = max(first_column, pad), min(first_column + len(logits), self.longest - 1)
        if start < stop:
            next_tokens = text[start + 1 - pad : stop + 1 - pad]
            part = logits[start - first_column : stop - first_column]
            self._logprobs[text] += prompt_logprobs(part, next_tokens, top)


def prefill_batch_size(
    waiting: Iterable[TextSequence], max_tokens: int, max_sequences: int, cached: Callable[[Tokens], int] = lambda _: 0
) -> int:
    """Return how many of the waiting sequences, from the first on, are worth reading as one batch.

    `cached` returns the tokens of a text that need not be read.
    """
    texts: dict[Tokens, int] = {}
    count = 0
    for sequence in islice(waiting, max_sequences):
        text = tuple(sequence.tokens)
        if text not in texts:
            more = {**texts, text: 0 if sequence.needs_prompt_logits else cached(text)}
            longest = max(map(len, more))
            start = min(longest - len(other) + known for other, known in more.items())
            tokens = len(more) * (longest - start)
            unread = sum(len(other) - known for other, known in more.items())
            if texts and (tokens > max_tokens or unread < _MIN_FILL * tokens):
                break
            texts = more
        count += 1
    return count


@dataclass(eq=False)
class Batch:
    """Sequences that are decoded together; row i of `cache` belongs to sequence i."""

    graph: DecoderGraph
    prefix: PrefixCache
    cache: KVCache | None = None
    sequences: tuple[TextSequence, ...] = ()
    preempted: set[TextSequence] = field(default_factory=set)  # leave before the next step

    def decode(self) -> StepResults:
        """Generate one token of each active sequence."""
        self._remove_inactive()
        if not self.sequences or self.cache is None:
            return []
        ids = np.array([[sequence.tokens[-1]] for sequence in self.sequences], np.int64)
        try:
            logits, self.cache = self.graph.run(self.cache, ids)
        except Exception as error:  # out of memory, or a failing model: the state of the cache is unknown
            failed, self.cache, self.sequences = self.sequences, None, ()
            return [(sequence, error) for sequence in failed]
        return [_extend(sequence, row) for sequence, row in zip(self.sequences, logits[:, -1], strict=True)]

    def read(self, prefill: Prefill, tokens: int) -> StepResults:
        """Read a part of the texts; with the last part, generate the next tokens and join the batch."""
        try:
            prefill.advance(tokens)
        except Exception as error:  # as above, but only these sequences are affected
            return [(sequence, error) for sequence in prefill.sequences]
        if not prefill.done:
            return []
        results: StepResults = []
        for sequence in prefill.sequences:
            chunk = None if sequence.generated else sequence.echo_prompt(prefill.logprobs(sequence))
            if chunk is not None:
                results.append((sequence, chunk))
            if not sequence.finished:
                results.append(_extend(sequence, prefill.next_logits(sequence)))
        prefill.store_prefixes()
        self._join(prefill)
        return results

    def active(self) -> list[TextSequence]:
        return [self.sequences[row] for row in self._active_rows()]

    def held_positions(self) -> int:
        """Return the positions of the cache, and of the copy without the rows that leave."""
        return self.cache.past * (self.cache.rows + len(self._active_rows())) if self.cache else 0

    def _active_rows(self) -> list[int]:
        return [
            row for row, sequence in enumerate(self.sequences) if sequence.is_active and sequence not in self.preempted
        ]

    def _remove_inactive(self) -> None:
        """Copy the cache of the active sequences; without inactive ones nothing is copied."""
        rows = self._active_rows()
        if len(rows) == len(self.sequences):
            return
        self._store_prefixes(rows)
        self.sequences = tuple(self.sequences[row] for row in rows)
        self.cache = self.graph.gather([(self.cache, rows)]) if rows and self.cache else None
        self.preempted.clear()

    def _store_prefixes(self, stay: list[int]) -> None:
        """Keep what was computed for the sequences that leave: the next turn of a chat begins with it."""
        for row in set(range(len(self.sequences))).difference(stay):
            sequence = self.sequences[row]
            if self.cache is not None and not sequence.failed and sequence not in self.preempted:
                self.prefix.store(sequence.tokens[: self.cache.past - int(self.cache.pads[row])], self.cache, row)

    def _join(self, prefill: Prefill) -> None:
        rows, joining = self._active_rows(), [sequence for sequence in prefill.sequences if sequence.is_active]
        self._store_prefixes(rows)
        parts: list[Any] = [(self.cache, rows)] if rows else []
        assert prefill.cache is not None, "read at least once"
        if joining:
            parts.append((prefill.cache, prefill.rows(joining)))
        self.sequences = (*(self.sequences[row] for row in rows), *joining)
        self.preempted.clear()
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
        sequence.finished = sequence.failed = True
        return sequence, error


class Engine:
    """Belongs to one event loop; the model runs in `pool`, one step after the other."""

    def __init__(
        self, graph: DecoderGraph, limits: EngineLimits, pool: Executor, metrics: TokenMetrics | None = None
    ) -> None:
        self.limits, self.metrics = limits, metrics or TokenMetrics()
        self.cache_budget = CacheBudget(graph.position_bytes, limits.cache_bytes)
        self.prefix = PrefixCache(graph.layers)
        self.prefix.limit(limits.cache_bytes)
        self._graph, self._pool = graph, pool
        self._batches: list[Batch] = []  # one, except where memory is short and lengths differ
        self._arrivals = itertools.count()
        self._waiting: deque[TextSequence] = deque()  # the oldest first
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
        """Bytes of the sequences that are not finished."""
        return self._required_bytes(self._groups(), 0)

    @property
    def max_positions(self) -> int:
        """Positions of one sequence that fit in the cache's memory."""
        return self.cache_budget.max_positions

    def check_fits(self, positions: int) -> None:
        """Raise InvalidPayload for a sequence that would never fit."""
        if positions > self.max_positions:
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
        for sequence in sequences:
            sequence.arrival = next(self._arrivals)
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
                steps = self._make_room()
                if any(batch.sequences for batch in self._batches):
                    await self._step(functools.partial(self._decode, steps, asyncio.get_running_loop()))
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
        self._batches, self._prefill = [], None
        self.prefix.limit(0)

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
        joining = self._prefill.batch if self._prefill else None
        self._batches = [batch for batch in self._batches if batch.sequences or batch is joining]
        return bool(self._waiting or self._batches)

    def _start_prefill(self) -> None:
        """Admit the next waiting sequences, as far as there is room."""
        if self._prefill is not None or not self._waiting:
            return
        free = self.limits.sequences - self.running
        if not free or self._batch_with_room([self._waiting[0]]) is None:
            return
        cached = lambda text: len(self.prefix.find(text)) * BLOCK_TOKENS  # noqa: E731
        size = prefill_batch_size(self._waiting, _MAX_PREFILL_TOKENS, free, cached)
        while (batch := self._batch_with_room(list(itertools.islice(self._waiting, size)))) is None:
            size //= 2  # 1 has room, as seen above
        admitted = [self._waiting.popleft() for _ in range(size)]
        now = time.monotonic()
        for sequence in admitted:
            request = sequence.group.request
            request.run_started_at = request.run_started_at or now
        if batch not in self._batches:
            self._batches.append(batch)
        self._prefill = Prefill(batch, admitted)
        self.metrics.prefix_queries += sum(len(sequence.prompt) for sequence in admitted if not sequence.preemptions)
        self.metrics.tokens_in += sum(len(sequence.prompt) for sequence in admitted if not sequence.preemptions)
        self.metrics.prefix_hits += sum(sequence.cached_tokens for sequence in admitted if not sequence.preemptions)

    def _batch_with_room(self, joining: list[TextSequence]) -> Batch | None:
        """Return the batch for these sequences, or None where they have to wait for memory.

        Texts of different lengths share a batch, which is faster, unless its padding takes memory that is short.
        """
        groups, limit = self._groups(), self.limits.cache_bytes
        batch, bytes_required = Batch(self._graph, self.prefix), self._required_bytes([*groups, joining])
        options: list[tuple[int, Batch]] = []
        for index, group in enumerate(groups):
            joined = [*group, *joining]
            lengths = [len(sequence.tokens) for sequence in joined]
            total = self._required_bytes([*groups[:index], joined, *groups[index + 1 :]])
            if total <= limit // 2 or min(lengths) >= _MIN_LENGTH * max(lengths):
                options.append((total, self._batches[index]))
        if options:
            bytes_required, batch = min(options, key=lambda option: option[0])
        alone = len(joining) == 1 and not any(groups)  # fits at its full length, as was checked
        return batch if alone or bytes_required <= limit else None

    def _make_room(self) -> int:
        """Preempt sequences until the others can have a token each. Return how many steps the memory allows."""
        limit = self.limits.cache_bytes
        while self.running > 1 and self._required_bytes(self._groups(), 1) > limit:
            self._preempt_youngest()
        groups = self._groups()
        steps = next((n for n in range(_STEPS_PER_RUN, 1, -1) if self._required_bytes(groups, n) <= limit), 1)
        held = sum(batch.held_positions() for batch in self._batches) * self.cache_budget.position_bytes
        self.prefix.limit(limit - max(held, self._required_bytes(groups, steps)))
        return steps

    def _preempt_youngest(self) -> None:
        if self._prefill is not None:  # read after all others were admitted
            preempted, self._prefill = _active(self._prefill.sequences), None
        else:
            preempted = [max(self._admitted(), key=lambda sequence: sequence.arrival)]
            for batch in self._batches:
                batch.preempted.update(preempted)
        for sequence in preempted:
            sequence.preemptions += 1
        self.metrics.preemptions += len(preempted)
        self._waiting.extendleft(reversed(preempted))

    async def _read(self, prefill: Prefill) -> None:
        batch = prefill.batch
        decoding = sum(len(group.active()) for group in self._batches)
        tokens = self.limits.prefill_part(len(prefill.sequences), decoding)
        timed = await self._step(lambda: [(time.monotonic(), batch.read(prefill, tokens))])
        if prefill.done or any(results for _, results in timed):
            self._prefill = None

    def _decode(self, steps: int, loop: asyncio.AbstractEventLoop) -> TimedResults:
        """Run several steps in the thread. Streams get each token at once, the others at the end."""
        timed: TimedResults = []
        until = time.monotonic() + _RUN_SECONDS
        for _ in range(steps):
            results = [result for batch in self._batches for result in batch.decode()]
            timed.append((time.monotonic(), results))
            if not results or self._waiting or self._prefill is not None or timed[-1][0] >= until:
                break
            if not all(sequence.is_active for sequence, _ in results):  # the memory of those that leave is free now
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
        return [sequence for group in self._groups() for sequence in group]

    def _groups(self) -> list[list[TextSequence]]:
        """Return the sequences of each batch, with those that will join it."""
        groups = []
        for batch in self._batches:
            joining = self._prefill.sequences if self._prefill and self._prefill.batch is batch else []
            groups.append(list(dict.fromkeys((*batch.active(), *_active(joining)))))  # both, for a moment
        return groups

    def _required_bytes(self, groups: Iterable[Sequence[TextSequence]], steps: int | None = None) -> int:
        """Return the bytes after so many more tokens of each sequence; None: as many as a new one needs room for."""
        return self.cache_budget.bytes(self._positions(group, steps) for group in groups)

    def _positions(self, group: Sequence[TextSequence], steps: int | None) -> int:
        if steps is None:
            longest = max((len(sequence.tokens) for sequence in group), default=0)
            steps = max(self.limits.room_tokens, int(_ROOM_SHARE * longest))
        ends = (min(sequence.max_positions, len(sequence.tokens) + steps) for sequence in group)
        return len(group) * max(ends, default=0)


def _active(sequences: Iterable[TextSequence]) -> list[TextSequence]:
    return [sequence for sequence in sequences if sequence.is_active]
