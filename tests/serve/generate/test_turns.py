"""Several tokens in a row in the thread that has the model."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from serve.generate.model import Words
from tests.serve.generate.test_engine import PROMPTS, Bench
from tests.serve.generate.test_engine import _all as all_of
from tests.serve.generate.test_engine import _run as run_bench


def test_who_listens_hears_of_a_token_before_the_next_is_written(
    words: Words, pool: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though several are written in a row, and the thread is not through with them."""
    run, heard = words.graph.run, [threading.Event() for _ in range(4)]
    runs: list[bool] = []

    def waiting(*given: Any) -> Any:
        if 1 < len(runs) < 1 + len(heard):  # the prompt's run gives the first token, the next one is nobody's guess
            assert heard[len(runs) - 1].wait(10)
        runs.append(True)
        return run(*given)

    async def asked(bench: Bench) -> None:
        monkeypatch.setattr(words.graph, "run", waiting)
        pieces = bench.engine.written(bench.writings(PROMPTS[2], 12))
        for one in heard:
            assert (await anext(pieces)).tokens == 1
            one.set()
        await all_of(pieces)

    run_bench(words, pool, asked)


def test_others_have_the_thread_before_a_long_text_is_through(words: Words) -> None:
    """It may be the only one, and another model's."""

    async def asked(bench: Bench, one: Executor) -> int:
        text = asyncio.create_task(bench.pieces(bench.writings(PROMPTS[2], 70)))
        while not bench.engine._batch.writings:
            await asyncio.sleep(0)
        before = await asyncio.get_running_loop().run_in_executor(one, lambda: bench.engine._batch.writings[0].count)
        assert len(await text) == 70
        return before

    with ThreadPoolExecutor(1) as one:
        assert run_bench(words, one, lambda bench: asked(bench, one)) < 70 - 8
