from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.errors import InvalidPayload
from serve.errors import Busy, Expired, Gone
from serve.generate.engine import Engine, Rules
from serve.generate.model import Words
from serve.generate.sampling import Sampling
from serve.generate.sequence import Asking, Order, Piece, Writing
from tests.serve.generate import tiny

RULES = Rules(rows=4, waiting=64, cache_bytes=1 << 24, read_at_once=16, read_between=6)
RANDOM = np.random.default_rng(4)
# Of lengths that leave much and little padding, and longer than what is read at once.
PROMPTS = [RANDOM.integers(4, tiny.VOCABULARY, size).tolist() for size in (1, 40, 3, 17, 18, 2, 33, 7)]
GREEDY = Sampling(temperature=0)


class Bench:
    """An engine, and clients that ask it."""

    def __init__(self, words: Words, pool: Executor, rules: Rules = RULES) -> None:
        self.words, self.engine = words, Engine(words.graph, rules, pool)

    def writings(self, prompt: Sequence[int], most: int, count: int = 1, **asking: Any) -> list[Writing]:
        order = asking.pop("order", None) or Order(most=most, sampling=GREEDY)
        asked = Asking(order, **asking)
        language = self.words.language
        return [Writing(asked, index, prompt, (tiny.END,), language.text) for index in range(count)]

    async def tokens(self, prompt: Sequence[int], most: int, **asking: Any) -> list[int]:
        """What was chosen, by the likelihoods that are told."""
        order = Order(most=most, sampling=asking.pop("sampling", GREEDY), seed=asking.pop("seed", None), top=0)
        pieces = await self.pieces(self.writings(prompt, most, order=order, **asking))
        return [one.token for piece in pieces for one in piece.told if not isinstance(one, int)]

    async def pieces(self, writings: list[Writing]) -> list[Piece]:
        return [piece async for piece in self.engine.written(writings)]

    async def idle(self) -> None:
        while self.engine._task is not None:
            await asyncio.sleep(0)


def _run(words: Words, pool: Executor, what: Callable[[Bench], Any], rules: Rules = RULES) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            bench = Bench(words, pool, rules)
            found = await what(bench)
            await bench.idle()
            assert (bench.engine.running, bench.engine.waiting, bench.engine.cache_bytes) == (0, 0, 0)
            return found

    return asyncio.run(limited())


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_a_text_is_the_same_in_whatever_company(words: Words, pool: Executor, tiny_path: Path, rows: int) -> None:
    """All at once: they are read in groups and parts, join while others write, and leave at different times."""
    lengths = [9, 21, 4, 30, 12, 1, 16, 25]

    async def mixed(bench: Bench) -> Any:
        return await asyncio.gather(*map(bench.tokens, PROMPTS, lengths))

    found = _run(words, pool, mixed, Rules(rows, 64, 1 << 24, read_at_once=16, read_between=6))
    assert found == [tiny.alone(tiny_path, prompt, most) for prompt, most in zip(PROMPTS, lengths, strict=True)]


def test_who_comes_later_joins_and_changes_nothing(words: Words, pool: Executor, tiny_path: Path) -> None:
    async def later(bench: Bench) -> Any:
        first = bench.engine.written(bench.writings(PROMPTS[1], 40))
        pieces = [await anext(first) for _ in range(3)]
        second = await bench.tokens(PROMPTS[0], 5)  # done while the first still writes
        assert bench.engine.running == 1
        third, rest = await asyncio.gather(bench.tokens(PROMPTS[6], 20), _all(first))
        return "".join(piece.text for piece in [*pieces, *rest]), second, third

    text, second, third = _run(words, pool, later)
    assert text == words.language.text(tiny.alone(tiny_path, PROMPTS[1], 40))
    assert second == tiny.alone(tiny_path, PROMPTS[0], 5)
    assert third == tiny.alone(tiny_path, PROMPTS[6], 20)


async def _all(pieces: Any) -> list[Piece]:
    return [piece async for piece in pieces]


def test_texts_of_one_prompt_are_drawn_each_by_itself_and_by_their_seed(words: Words, pool: Executor) -> None:
    order = Order(most=12, sampling=Sampling(), seed=3, top=0)

    async def drawn(bench: Bench) -> Any:
        alone = await bench.pieces(bench.writings(PROMPTS[2], 12, count=3, order=order))
        both = await asyncio.gather(
            bench.pieces(bench.writings(PROMPTS[2], 12, count=3, order=order)), bench.tokens(PROMPTS[3], 20)
        )
        return _texts(alone), _texts(both[0])

    alone, company = _run(words, pool, drawn)
    assert alone == company
    assert len(set(alone)) == 3


def _texts(pieces: list[Piece]) -> list[str]:
    return ["".join(piece.text for piece in pieces if piece.index == index) for index in range(3)]


def test_texts_are_written_as_far_as_memory_goes_and_the_others_wait(
    words: Words, pool: Executor, tiny_path: Path
) -> None:
    positions = len(PROMPTS[3]) + 10
    engine_bytes = 2 * 2 * positions * words.graph.position_bytes  # two texts, and each for a moment twice
    seen = []

    async def crowd(bench: Bench) -> Any:
        async def watch() -> None:
            while True:
                seen.append((bench.engine.running, bench.engine.cache_bytes))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        found = await asyncio.gather(*(bench.tokens(PROMPTS[3], 10) for _ in range(5)))
        watching.cancel()
        return found

    found = _run(words, pool, crowd, Rules(8, 64, engine_bytes))
    assert found == [tiny.alone(tiny_path, PROMPTS[3], 10)] * 5
    assert max(running for running, _ in seen) == 2
    assert max(held for _, held in seen) == engine_bytes


def test_what_can_never_fit_is_refused_with_what_would(words: Words, pool: Executor) -> None:
    engine = Engine(words.graph, Rules(4, 8, 2 * 10 * words.graph.position_bytes), pool)
    engine.check(10)
    with pytest.raises(InvalidPayload, match="may take 11 positions; the service has memory for 10 of one text"):
        engine.check(11)


def test_who_finds_too_many_waiting_is_told_when_to_come_again(words: Words, pool: Executor) -> None:
    async def crowd(bench: Bench) -> Any:
        asked = [asyncio.create_task(bench.tokens(PROMPTS[3], 12)) for _ in range(3)]
        await asyncio.sleep(0)  # all three have asked, one of them may begin and two wait
        found = await asyncio.gather(*asked, bench.tokens(PROMPTS[0], 3), return_exceptions=True)
        return found[-1]

    refusal = _run(words, pool, crowd, Rules(1, 2, 1 << 24))
    assert isinstance(refusal, Busy)
    assert "wait already" in str(refusal)
    assert dict(refusal.headers)[b"retry-after"].isdigit()


def test_who_left_is_written_for_no_more(words: Words, pool: Executor, tiny_path: Path) -> None:
    left: list[bool] = []

    async def leaving(bench: Bench) -> Any:
        pieces = bench.engine.written(bench.writings(PROMPTS[1], 50, gone=lambda: bool(left)))
        other = asyncio.create_task(bench.tokens(PROMPTS[4], 30))
        await anext(pieces)
        left.append(True)
        with pytest.raises(Gone):
            await _all(pieces)
        return await other

    assert _run(words, pool, leaving) == tiny.alone(tiny_path, PROMPTS[4], 30)


def test_who_stops_listening_leaves_the_batch(words: Words, pool: Executor) -> None:
    async def leaving(bench: Bench) -> int:
        pieces = bench.engine.written(bench.writings(PROMPTS[1], 50))
        await anext(pieces)
        await pieces.aclose()
        await bench.idle()
        return bench.engine.meter.tokens_out

    assert _run(words, pool, leaving) < 10


def test_a_deadline_passes_for_who_waits_and_for_who_is_written_for(words: Words, pool: Executor) -> None:
    async def late(bench: Bench) -> None:
        held = bench.engine.written(bench.writings(PROMPTS[1], 55))
        await anext(held)
        soon = time.monotonic() + 0.01
        with pytest.raises(Expired, match="the deadline passed before the text was written"):
            await bench.pieces(bench.writings(PROMPTS[0], 5, deadline=soon))
        with pytest.raises(Expired, match="before the first token"):
            await bench.pieces(bench.writings(PROMPTS[0], 5, deadline=time.monotonic()))
        await held.aclose()

    gate = _Gate()
    with gate.pool as slow:
        _run(words, slow, late, Rules(1, 8, 1 << 24))


class _Gate:
    """A pool whose every step takes a while, as those of a large model do."""

    class Slow(ThreadPoolExecutor):
        def submit(self, work: Any, /, *args: Any, **named: Any) -> Any:
            def slowly() -> Any:
                time.sleep(0.004)
                return work(*args, **named)

            return super().submit(slowly)

    @property
    def pool(self) -> ThreadPoolExecutor:
        return self.Slow(1)


def test_the_time_to_read_a_long_prompt_is_shared_with_those_who_write(words: Words, pool: Executor) -> None:
    """40 tokens in parts of 6: whoever writes meanwhile gets a token between any two of them."""
    order = []

    async def together(bench: Bench) -> None:
        writing = bench.engine.written(bench.writings(PROMPTS[2], 20))
        await anext(writing)
        reading = asyncio.create_task(bench.pieces(bench.writings(PROMPTS[1], 1)))
        while not reading.done():
            order.append((await anext(writing)).tokens)
        await writing.aclose()

    _run(words, pool, together)
    assert sum(order) >= math.ceil(40 / 6) - 1


def test_a_model_that_fails_fails_for_those_inside_and_goes_on(
    words: Words, pool: Executor, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = words.graph.run, []

    def failing(*given: Any) -> Any:
        runs.append(1)
        if len(runs) == 3:
            raise MemoryError("no more")
        return run(*given)

    async def asked(bench: Bench) -> Any:
        monkeypatch.setattr(words.graph, "run", failing)
        with pytest.raises(MemoryError):
            await bench.tokens(PROMPTS[0], 8)
        return await bench.tokens(PROMPTS[0], 8)

    assert _run(words, pool, asked) == tiny.alone(tiny_path, PROMPTS[0], 8)


def test_logits_that_are_no_numbers_fail_one_text_alone(
    words: Words, pool: Executor, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = words.graph.run

    def spoiled(block: Any, ids: Any) -> Any:
        logits, after = run(block, ids)
        if len(logits) == 2:
            logits[1] = np.nan
        return logits, after

    async def both(bench: Bench) -> Any:
        monkeypatch.setattr(words.graph, "run", spoiled)
        return await asyncio.gather(bench.tokens(PROMPTS[3], 9), bench.tokens(PROMPTS[4], 9), return_exceptions=True)

    fine, failed = _run(words, pool, both)
    assert fine == tiny.alone(tiny_path, PROMPTS[3], 9)
    assert isinstance(failed, ArithmeticError)


def test_when_the_pool_is_shut_everybody_hears_that_the_service_ends(words: Words) -> None:
    shut = ThreadPoolExecutor(1)
    shut.shutdown()

    async def asked(bench: Bench) -> None:
        found = await asyncio.gather(*(bench.tokens(one, 5) for one in PROMPTS), return_exceptions=True)
        assert {str(one) for one in found} == {"the service ends; ask again"}

    _run(words, shut, asked)


def test_tokens_are_counted_and_timed(words: Words, pool: Executor) -> None:
    async def asked(bench: Bench) -> Any:
        await asyncio.gather(bench.tokens(PROMPTS[3], 5), bench.tokens(PROMPTS[4], 6))
        return bench.engine.meter

    meter = _run(words, pool, asked)
    assert (meter.tokens_in, meter.tokens_out) == (len(PROMPTS[3]) + len(PROMPTS[4]), 11)
    assert (meter.first_seconds.count, meter.between_seconds.count) == (2, 9)


def test_as_much_is_read_between_two_tokens_as_more_read_than_write() -> None:
    asked = [(1, 0), (1, 1), (1, 7), (3, 1), (6, 3), (7, 1)]  # how many read, how many write
    assert [Rules(8, 64, 1 << 24).tokens(*one) for one in asked] == [512, 128, 128, 384, 256, 512]
