from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.errors import Busy, ClientDisconnected, DeadlineExceeded
from serve.runtime.batcher import Batcher, BatchingOptions
from tests.serve.doubling_model import MERGING, Model, ask, behind_a_gate, rows, run


def test_expired_request_fails_at_once_and_is_not_computed(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        soon = time.monotonic() + 0.02
        first, late, patient = await behind_a_gate(
            model, batcher, ask(batcher, rows(1), deadline=soon), ask(batcher, rows(2), deadline=soon + 100)
        )
        with pytest.raises(DeadlineExceeded):
            await late  # the gate is still closed: it did not wait for the running request
        assert batcher.waiting == 1
        model.gate.set()
        assert [await first, await patient] == [[200], [4]]
        with pytest.raises(DeadlineExceeded):
            await ask(batcher, rows(3), deadline=time.monotonic())
        assert [one.ravel().tolist() for one in model.batches] == [[100], [2]]

    run(body)


def test_requests_expire_in_the_order_of_their_deadlines(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher, now = Batcher(model, MERGING, pool), time.monotonic()
        received: list[float] = []

        async def late(seconds: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await ask(batcher, rows(1), deadline=now + seconds)
            received.append(seconds)

        tasks = await behind_a_gate(model, batcher, late(0.6), late(0.2), late(0.4))
        await asyncio.gather(*tasks[1:])
        assert received == [0.2, 0.4, 0.6]
        model.gate.set()
        await tasks[0]

    run(body)


def test_full_queue_refuses_until_a_client_disconnects(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=8, max_waiting=2), pool)
        here = {1: True, 2: True}
        first, one, two = await behind_a_gate(
            model,
            batcher,
            ask(batcher, rows(1), gone=lambda: not here[1]),
            ask(batcher, rows(2), gone=lambda: not here[2]),
        )
        with pytest.raises(Busy, match="2 requests wait already") as refusal:
            await ask(batcher, rows(3))
        assert dict(refusal.value.headers)[b"retry-after"].isdigit()
        here[1] = False
        await asyncio.sleep(0.03)
        third = asyncio.create_task(ask(batcher, rows(3)))
        with pytest.raises(ClientDisconnected):
            await one
        model.gate.set()
        assert [await first, await two, await third] == [[200], [4], [6]]

    run(body)


def test_requests_that_would_be_late_are_refused_except_the_last(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher, soon = Batcher(model, BatchingOptions(mergeable=True, max_rows=4), pool), time.monotonic() + 15
        sent = (ask(batcher, rows(value), deadline=soon) for value in (1, 2, 3))
        first, *late, last = await behind_a_gate(model, batcher, *sent, ask(batcher, rows(4), deadline=soon))
        batcher._estimate.record(0, 1, 100.0)  # as if a row took minutes
        model.gate.set()
        assert await first == [200]
        for one in late:
            with pytest.raises(Busy, match="that its deadline cannot be met"):
                await one
        assert await last == [8], "otherwise a wrong estimate would never be corrected"

    run(body)


def test_overestimated_run_time_is_corrected_soon(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=1), pool)
        model.seconds = 0.2
        await ask(batcher, rows(0))
        model.seconds = 0.001
        for _ in range(3):
            assert await ask(batcher, rows(1), deadline=time.monotonic() + 0.1) == [2]

    run(body)


def test_overload_is_refused_before_the_run(model: Model, pool: ThreadPoolExecutor) -> None:
    """Every run of the model is for a request that was admitted and answered."""

    async def body() -> None:
        model.seconds, timeout = 0.01, 0.3
        batcher = Batcher(model, BatchingOptions(mergeable=False), pool)
        await ask(batcher, rows(0))  # the estimate needs a run
        answered, refused = 0, 0

        async def request() -> None:
            nonlocal answered, refused
            try:
                await ask(batcher, rows(1), deadline=time.monotonic() + timeout)
                answered += 1
            except (Busy, DeadlineExceeded):
                refused += 1

        count = int(4 * timeout / model.seconds)  # four times what can be done in time
        await asyncio.gather(*(request() for _ in range(count)))
        assert answered + refused == count
        assert refused > 0
        assert len(model.batches) == answered + 1

    run(body)


def test_waiting_batcher_uses_no_cpu(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=1), pool)
        far = time.monotonic() + 100
        tasks = await behind_a_gate(model, batcher, *(ask(batcher, rows(1), deadline=far) for _ in range(20)))
        before = time.thread_time()
        await asyncio.sleep(0.1)
        assert time.thread_time() - before < 0.02
        model.gate.set()
        await asyncio.gather(*tasks)
        assert batcher.waiting == 0

    run(body)


def test_waiting_requests_fail_when_the_pool_shuts_down(model: Model) -> None:
    async def body() -> None:
        pool = ThreadPoolExecutor(1)
        batcher = Batcher(model, BatchingOptions(mergeable=False), pool)
        first, waiting = await behind_a_gate(model, batcher, ask(batcher, rows(1)))
        pool.shutdown(wait=False, cancel_futures=True)
        model.gate.set()
        assert await first == [200]
        with pytest.raises(Busy, match="the service is shutting down"):
            await waiting

    run(body)
