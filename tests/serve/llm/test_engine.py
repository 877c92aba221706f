from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.system.errors import InvalidPayload
from serve.errors import Busy, ClientDisconnected, DeadlineExceeded
from serve.llm.engine import Engine, EngineLimits
from serve.llm.model import LanguageModel
from serve.llm.sampling import Sampling
from serve.llm.sequence import Chunk, GenerationOptions, SequenceGroup, TextSequence
from tests.serve.doubling_model import Client
from tests.serve.llm import tiny

LIMITS = EngineLimits(sequences=4, waiting=64, cache_bytes=1 << 24, prefill_tokens=16, prefill_tokens_while_decoding=6)
RANDOM = np.random.default_rng(4)
# With much and little padding, and longer than one part of a prefill.
PROMPTS = [RANDOM.integers(4, tiny.VOCABULARY, size).tolist() for size in (1, 40, 3, 17, 18, 2, 33, 7)]
GREEDY = Sampling(temperature=0)


class EngineHarness:
    """An engine and its clients."""

    def __init__(self, language_model: LanguageModel, pool: Executor, limits: EngineLimits = LIMITS) -> None:
        self.model, self.engine = language_model, Engine(language_model.graph, limits, pool)

    def sequences(self, prompt: Sequence[int], most: int, count: int = 1, **client: Any) -> list[TextSequence]:
        options = client.pop("options", None) or GenerationOptions(max_tokens=most, sampling=GREEDY)
        group = SequenceGroup(options, Client(**client))
        tokenizer = self.model.tokenizer
        return [TextSequence(group, index, prompt, (tiny.END,), tokenizer.text) for index in range(count)]

    async def tokens(self, prompt: Sequence[int], most: int, **client: Any) -> list[int]:
        """Return the chosen tokens, read from their log probabilities."""
        options = GenerationOptions(
            max_tokens=most, sampling=client.pop("sampling", GREEDY), seed=client.pop("seed", None), top_logprobs=0
        )
        chunks = await self.chunks(self.sequences(prompt, most, options=options, **client))
        return [one.token for chunk in chunks for one in chunk.logprobs if not isinstance(one, int)]

    async def chunks(self, sequences: list[TextSequence]) -> list[Chunk]:
        return [chunk async for chunk in self.engine.generate(sequences)]

    async def idle(self) -> None:
        while self.engine._task is not None:
            await asyncio.sleep(0)


def _run(
    language_model: LanguageModel,
    pool: Executor,
    scenario: Callable[[EngineHarness], Any],
    limits: EngineLimits = LIMITS,
) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            harness = EngineHarness(language_model, pool, limits)
            found = await scenario(harness)
            await harness.idle()
            assert (harness.engine.running, harness.engine.waiting, harness.engine.cache_bytes) == (0, 0, 0)
            return found

    return asyncio.run(limited())


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_text_does_not_depend_on_the_batch(
    language_model: LanguageModel, pool: Executor, tiny_path: Path, rows: int
) -> None:
    """Prompts are read in groups and parts, join while others are decoded, and leave at different times."""
    lengths = [9, 21, 4, 30, 12, 1, 16, 25]

    async def mixed(harness: EngineHarness) -> Any:
        return await asyncio.gather(*map(harness.tokens, PROMPTS, lengths))

    found = _run(
        language_model, pool, mixed, EngineLimits(rows, 64, 1 << 24, prefill_tokens=16, prefill_tokens_while_decoding=6)
    )
    assert found == [tiny.greedy_tokens(tiny_path, prompt, most) for prompt, most in zip(PROMPTS, lengths, strict=True)]


def test_joining_sequences_change_no_text(language_model: LanguageModel, pool: Executor, tiny_path: Path) -> None:
    async def later(harness: EngineHarness) -> Any:
        first = harness.engine.generate(harness.sequences(PROMPTS[1], 40))
        chunks = [await anext(first) for _ in range(3)]
        second = await harness.tokens(PROMPTS[0], 5)  # finished before the first
        assert harness.engine.running == 1
        third, rest = await asyncio.gather(harness.tokens(PROMPTS[6], 20), _all(first))
        return "".join(chunk.text for chunk in [*chunks, *rest]), second, third

    text, second, third = _run(language_model, pool, later)
    assert text == language_model.tokenizer.text(tiny.greedy_tokens(tiny_path, PROMPTS[1], 40))
    assert second == tiny.greedy_tokens(tiny_path, PROMPTS[0], 5)
    assert third == tiny.greedy_tokens(tiny_path, PROMPTS[6], 20)


async def _all(chunks: Any) -> list[Chunk]:
    return [chunk async for chunk in chunks]


def test_sequences_of_one_prompt_are_sampled_independently_by_seed(
    language_model: LanguageModel, pool: Executor
) -> None:
    options = GenerationOptions(max_tokens=12, sampling=Sampling(), seed=3, top_logprobs=0)

    async def drawn(harness: EngineHarness) -> Any:
        alone = await harness.chunks(harness.sequences(PROMPTS[2], 12, count=3, options=options))
        both = await asyncio.gather(
            harness.chunks(harness.sequences(PROMPTS[2], 12, count=3, options=options)), harness.tokens(PROMPTS[3], 20)
        )
        return _texts(alone), _texts(both[0])

    alone, company = _run(language_model, pool, drawn)
    assert alone == company
    assert len(set(alone)) == 3


def _texts(chunks: list[Chunk]) -> list[str]:
    return ["".join(chunk.text for chunk in chunks if chunk.index == index) for index in range(3)]


def test_memory_limits_how_many_sequences_run(language_model: LanguageModel, pool: Executor, tiny_path: Path) -> None:
    positions = len(PROMPTS[3]) + 10
    engine_bytes = (
        2 * 2 * positions * language_model.graph.position_bytes
    )  # two sequences, each stored twice for a moment
    seen = []

    async def scenario(harness: EngineHarness) -> Any:
        async def watch() -> None:
            while True:
                seen.append((harness.engine.running, harness.engine.cache_bytes))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        found = await asyncio.gather(*(harness.tokens(PROMPTS[3], 10) for _ in range(5)))
        watching.cancel()
        return found

    found = _run(language_model, pool, scenario, EngineLimits(8, 64, engine_bytes))
    assert found == [tiny.greedy_tokens(tiny_path, PROMPTS[3], 10)] * 5
    assert max(running for running, _ in seen) == 2
    assert engine_bytes / 2 < max(held for _, held in seen) <= engine_bytes


def _limits_for(language_model: LanguageModel, positions: int, **limits: Any) -> EngineLimits:
    """Return limits with memory for one text of so many positions."""
    engine_bytes = 2 * positions * language_model.graph.position_bytes
    return EngineLimits(**{"sequences": 8, "waiting": 64, "cache_bytes": engine_bytes, "room_tokens": 4, **limits})


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)])
def test_texts_are_complete_when_memory_runs_out(
    language_model: LanguageModel, pool: Executor, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    """Eight texts that may take all positions, and memory for one at full length."""
    prompts = [[*PROMPTS[2], token] for token in range(4, 10)] + PROMPTS[:2]
    seen = []

    def text(harness: EngineHarness, prompt: Sequence[int]) -> Any:
        return harness.tokens(prompt, tiny.POSITIONS - len(prompt), sampling=sampling, seed=5)

    async def together(harness: EngineHarness) -> Any:
        engine, make_room = harness.engine, harness.engine._make_room

        def recorded() -> int:
            steps = make_room()
            seen.append((engine.running, engine.cache_bytes + engine.prefix.bytes))
            return steps

        monkeypatch.setattr(engine, "_make_room", recorded)
        return await asyncio.gather(*(text(harness, prompt) for prompt in prompts)), engine.metrics

    limits = _limits_for(language_model, tiny.POSITIONS)
    found, metrics = _run(language_model, pool, together, limits)
    alone = [_run(language_model, pool, functools.partial(text, prompt=prompt)) for prompt in prompts]
    assert found == alone
    assert max(running for running, _ in seen) >= 6
    assert metrics.preemptions > 0
    assert metrics.tokens_out == sum(map(len, found))
    assert metrics.tokens_in == sum(map(len, prompts)), "reading again is not counted"
    assert max(held for _, held in seen) <= limits.cache_bytes


def test_prompt_is_echoed_once_although_its_sequence_is_preempted(
    language_model: LanguageModel, pool: Executor
) -> None:
    options = GenerationOptions(max_tokens=50, sampling=GREEDY, echo=True, top_logprobs=0)

    async def together(harness: EngineHarness) -> Any:
        echoes = [harness.sequences(PROMPTS[3], 50, options=options) for _ in range(4)]
        chunks = await asyncio.gather(*map(harness.chunks, echoes))
        return chunks, [sequence.preemptions for (sequence,) in echoes]

    chunks, preemptions = _run(language_model, pool, together, _limits_for(language_model, 80))
    assert max(preemptions) > 0
    for found in chunks:
        tokens = [entry if isinstance(entry, int) else entry.token for chunk in found for entry in chunk.logprobs]
        assert tokens[: len(PROMPTS[3])] == PROMPTS[3]
        assert tokens == [
            entry if isinstance(entry, int) else entry.token for chunk in chunks[0] for entry in chunk.logprobs
        ]


def test_youngest_sequence_is_preempted(language_model: LanguageModel, pool: Executor) -> None:
    async def together(harness: EngineHarness) -> Any:
        texts = [harness.sequences(PROMPTS[3], 70) for _ in range(4)]
        await asyncio.gather(*map(harness.chunks, texts))
        return [sequence.preemptions for (sequence,) in texts]

    first, *_, last = _run(language_model, pool, together, _limits_for(language_model, 90))
    assert (first, last > 0) == (0, True)


def test_short_texts_run_beside_one_that_takes_most_of_the_memory(
    language_model: LanguageModel, pool: Executor, tiny_path: Path
) -> None:
    """In one batch, the padding of the short texts would need twice the memory that there is."""

    async def together(harness: EngineHarness) -> Any:
        (long,), *short = [harness.sequences(prompt, most) for prompt, most in cases]
        chunks = harness.engine.generate([long])
        await anext(chunks)
        await asyncio.gather(*(harness.chunks(sequences) for sequences in short))
        await _all(chunks)
        return [long, *(sequence for (sequence,) in short)], harness.engine.metrics.preemptions

    cases = [(PROMPTS[1], 55), *[(PROMPTS[0], 8)] * 3]
    (long, *short), preemptions = _run(language_model, pool, together, _limits_for(language_model, 110))
    assert preemptions == 0
    assert max(sequence.last_token_at for sequence in short) < long.last_token_at, "they did not wait for it"
    assert [sequence.tokens[len(sequence.prompt) :] for sequence in (long, *short)] == [
        tiny.greedy_tokens(tiny_path, prompt, most) for prompt, most in cases
    ]


def test_preempted_text_stops_when_its_client_is_gone(language_model: LanguageModel, pool: Executor) -> None:
    left: list[bool] = []

    async def leaving(harness: EngineHarness) -> Any:
        texts = [harness.sequences(PROMPTS[3], 70, gone=lambda: bool(left)) for _ in range(3)]
        tasks = [asyncio.create_task(harness.chunks(text)) for text in texts]
        while not harness.engine.metrics.preemptions:
            await asyncio.sleep(0)
        left.append(True)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [type(error) for error in found]

    found = _run(language_model, pool, leaving, _limits_for(language_model, 90))
    assert found == [ClientDisconnected] * 3


def test_sequence_that_never_fits_is_rejected(language_model: LanguageModel, pool: Executor) -> None:
    engine = Engine(language_model.graph, EngineLimits(4, 8, 2 * 10 * language_model.graph.position_bytes), pool)
    engine.check_fits(10)
    with pytest.raises(InvalidPayload, match="may take 11 positions; the service has memory for 10 of one text"):
        engine.check_fits(11)


def test_full_queue_is_rejected_with_retry_after(language_model: LanguageModel, pool: Executor) -> None:
    async def scenario(harness: EngineHarness) -> Any:
        tasks = [asyncio.create_task(harness.tokens(PROMPTS[3], 12)) for _ in range(3)]
        await asyncio.sleep(0)  # one of the three may begin, two wait
        found = await asyncio.gather(*tasks, harness.tokens(PROMPTS[0], 3), return_exceptions=True)
        return found[-1]

    refusal = _run(language_model, pool, scenario, EngineLimits(1, 2, 1 << 24))
    assert isinstance(refusal, Busy)
    assert "already wait" in str(refusal)
    assert dict(refusal.headers)[b"retry-after"].isdigit()


def test_disconnected_client_is_removed_from_the_batch(
    language_model: LanguageModel, pool: Executor, tiny_path: Path
) -> None:
    left: list[bool] = []

    async def leaving(harness: EngineHarness) -> Any:
        chunks = harness.engine.generate(harness.sequences(PROMPTS[1], 50, gone=lambda: bool(left)))
        other = asyncio.create_task(harness.tokens(PROMPTS[4], 30))
        await anext(chunks)
        left.append(True)
        with pytest.raises(ClientDisconnected):
            await _all(chunks)
        return await other

    assert _run(language_model, pool, leaving) == tiny.greedy_tokens(tiny_path, PROMPTS[4], 30)


def test_closed_generator_leaves_the_batch(language_model: LanguageModel, pool: Executor) -> None:
    async def leaving(harness: EngineHarness) -> int:
        chunks = harness.engine.generate(harness.sequences(PROMPTS[1], 50))
        await anext(chunks)
        await chunks.aclose()
        await harness.idle()
        return harness.engine.metrics.tokens_out

    assert _run(language_model, pool, leaving) < 10


def test_deadline_holds_in_the_queue_and_during_generation(language_model: LanguageModel, pool: Executor) -> None:
    async def late(harness: EngineHarness) -> None:
        held = harness.engine.generate(harness.sequences(PROMPTS[1], 55))
        await anext(held)
        soon = time.monotonic() + 0.01
        with pytest.raises(DeadlineExceeded, match="the deadline passed before the text was complete"):
            await harness.chunks(harness.sequences(PROMPTS[0], 5, deadline=soon))
        with pytest.raises(DeadlineExceeded, match="before the first token"):
            await harness.chunks(harness.sequences(PROMPTS[0], 5, deadline=time.monotonic()))
        await held.aclose()

    slow_pool = _SlowPool()
    with slow_pool.pool as slow:
        _run(language_model, slow, late, EngineLimits(1, 8, 1 << 24))


class _SlowPool:
    """Slows down every step, like a large model."""

    class Slow(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **named: Any) -> Any:
            def slowly() -> Any:
                time.sleep(0.004)
                return work(*args, **named)

            return super().submit(slowly)

    @property
    def pool(self) -> ThreadPoolExecutor:
        return self.Slow(1)


def test_long_prefill_alternates_with_decoding(language_model: LanguageModel, pool: Executor) -> None:
    """40 tokens are read in parts of 6: the other sequence gets a token between any two of them."""
    sizes = []

    async def together(harness: EngineHarness) -> None:
        sequence = harness.engine.generate(harness.sequences(PROMPTS[2], 20))
        await anext(sequence)
        reading = asyncio.create_task(harness.chunks(harness.sequences(PROMPTS[1], 1)))
        while not reading.done():
            sizes.append((await anext(sequence)).tokens)
        await sequence.aclose()

    _run(language_model, pool, together)
    assert sum(sizes) >= math.ceil(40 / 6) - 1


def test_model_failure_fails_the_batch_and_the_engine_continues(
    language_model: LanguageModel, pool: Executor, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = language_model.graph.run, []

    def failing(*given: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise MemoryError("no more")
        return run(*given)

    async def requests(harness: EngineHarness) -> Any:
        monkeypatch.setattr(language_model.graph, "run", failing)
        with pytest.raises(MemoryError):
            await harness.tokens(PROMPTS[0], 8)
        return await harness.tokens(PROMPTS[0], 8)

    assert _run(language_model, pool, requests) == tiny.greedy_tokens(tiny_path, PROMPTS[0], 8)


def test_nan_logits_fail_only_their_sequence(
    language_model: LanguageModel, pool: Executor, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = language_model.graph.run

    def spoiled(block: Any, ids: Any) -> Any:
        logits, after = run(block, ids)
        if len(logits) == 2:
            logits[1] = np.nan
        return logits, after

    async def both(harness: EngineHarness) -> Any:
        monkeypatch.setattr(language_model.graph, "run", spoiled)
        return await asyncio.gather(
            harness.tokens(PROMPTS[3], 9), harness.tokens(PROMPTS[4], 9), return_exceptions=True
        )

    fine, failed = _run(language_model, pool, both)
    assert fine == tiny.greedy_tokens(tiny_path, PROMPTS[3], 9)
    assert isinstance(failed, ArithmeticError)


def test_shutdown_of_the_pool_fails_every_request(language_model: LanguageModel) -> None:
    shut = ThreadPoolExecutor(1)
    shut.shutdown()

    async def requests(harness: EngineHarness) -> None:
        found = await asyncio.gather(*(harness.tokens(one, 5) for one in PROMPTS), return_exceptions=True)
        assert {str(one) for one in found} == {"the service is shutting down; try again"}

    _run(language_model, shut, requests)


def test_tokens_are_counted_and_timed(language_model: LanguageModel, pool: Executor) -> None:
    async def requests(harness: EngineHarness) -> Any:
        await asyncio.gather(harness.tokens(PROMPTS[3], 5), harness.tokens(PROMPTS[4], 6))
        return harness.engine.metrics

    meter = _run(language_model, pool, requests)
    assert (meter.tokens_in, meter.tokens_out) == (len(PROMPTS[3]) + len(PROMPTS[4]), 11)
    assert (meter.first_seconds.count, meter.between_seconds.count) == (2, 9)


def test_prefill_part_grows_with_the_share_of_readers() -> None:
    cases = [(1, 0), (1, 1), (1, 7), (3, 1), (6, 3), (7, 1)]  # sequences that are read, and decoded
    assert [EngineLimits(8, 64, 1 << 24).prefill_part(*case) for case in cases] == [512, 128, 128, 384, 256, 512]


# Several steps in a row in the model's thread


def test_stream_gets_each_token_before_the_next_step(
    language_model: LanguageModel, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread runs several steps without returning to the event loop."""
    run, heard = language_model.graph.run, [threading.Event() for _ in range(4)]
    runs: list[bool] = []

    def waiting(*given: Any) -> Any:
        if 1 < len(runs) < 1 + len(heard):  # the prefill gives the first token; steps after it wait
            assert heard[len(runs) - 1].wait(300)
        runs.append(True)
        return run(*given)

    async def requests(harness: EngineHarness) -> None:
        monkeypatch.setattr(language_model.graph, "run", waiting)
        chunks = harness.engine.generate(harness.sequences(PROMPTS[2], 12))
        for one in heard:
            assert (await anext(chunks)).tokens == 1
            one.set()
        await _all(chunks)

    _run(language_model, pool, requests)


def test_long_text_gives_the_thread_to_others(language_model: LanguageModel) -> None:
    """The pool may have one thread, which another model needs too."""

    async def requests(harness: EngineHarness, one: Executor) -> int:
        text = asyncio.create_task(harness.chunks(harness.sequences(PROMPTS[2], 70)))
        while not any(batch.sequences for batch in harness.engine._batches):
            await asyncio.sleep(0)
        before = await asyncio.get_running_loop().run_in_executor(one, lambda: harness.engine._admitted()[0].generated)
        assert len(await text) == 70
        return before

    with ThreadPoolExecutor(1) as one:
        assert _run(language_model, one, lambda harness: requests(harness, one)) < 70 - 8
