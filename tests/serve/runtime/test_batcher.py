"""Dynamic batching, and the estimate of run times."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.contract.codec import Array, Arrays
from serve.runtime.batcher import Batcher, BatchingOptions, RunTimeEstimate
from tests.serve.doubling_model import MERGING, Client, Model, ask, behind_a_gate, rows, run, together


def test_waiting_requests_run_as_one_batch(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        found = await together(ask(batcher, rows(1)), ask(batcher, rows(2, 3)), ask(batcher, rows(4, 5, 6)))
        assert found == [[2], [4, 6], [8, 10, 12]]
        assert model.rows == [6]

    run(body)


def test_batch_size_is_limited_except_for_single_requests(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        sizes = [5, 3, 1, 20, 2, 7]
        found = await together(*(ask(batcher, rows(*range(size))) for size in sizes))
        assert found == [[2 * value for value in range(size)] for size in sizes]
        assert model.rows == [8, 1, 20, 2, 7]

    run(body)


def test_dependent_rows_run_one_request_at_a_time(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=False), pool)
        assert await together(*(ask(batcher, rows(value)) for value in range(3))) == [[0], [2], [4]]
        assert model.rows == [1, 1, 1]

    run(body)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ({"x": np.ones((1, 2), np.float32)}, ("y",)),
        ({"x": np.ones((1, 1), np.float64)}, ("y",)),
        ({"x": np.ones((1, 1), np.float32)}, ("y", "z")),
        ({"x": np.ones((1, 1), np.float32), "more": np.ones((1, 1), np.float32)}, ("y",)),
    ],
    ids=["shape", "type", "outputs", "inputs"],
)
def test_different_inputs_or_outputs_are_never_merged(
    model: Model, pool: ThreadPoolExecutor, other: Arrays, wanted: tuple[str, ...]
) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, other, *wanted), ask(batcher, rows(2)))
        assert model.rows == [2, 1]

    run(body)


def test_failing_request_is_isolated_by_halving_the_batch(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        requests = (ask(batcher, rows(value)) for value in (1, 2, 3, -7, 5, 6, 7, 8))
        found = await asyncio.gather(*requests, return_exceptions=True)
        assert found[:3] + found[4:] == [[2], [4], [6], [10], [12], [14], [16]]
        assert isinstance(found[3], ValueError)
        assert "negative: -7" in str(found[3])
        assert model.rows == [8, 4, 2, 2, 1, 1, 4], "by halves, not one by one"
        assert await ask(batcher, rows(9)) == [18]

    run(body)


def test_outputs_without_a_row_per_input_run_separately(pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(lambda arrays, _: {"y": arrays["x"].sum(axis=0)}, MERGING, pool)
        assert await together(ask(batcher, rows(1)), ask(batcher, rows(2, 3))) == [[1], [5]]

    run(body)


def test_cancelled_request_does_not_affect_its_batch(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        model.gate.clear()
        one, other = asyncio.create_task(ask(batcher, rows(1))), asyncio.create_task(ask(batcher, rows(2)))
        await model.until_entered()
        one.cancel()
        model.gate.set()
        assert await other == [4]

    run(body)


def test_oldest_request_runs_first(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=2), pool)
        wide = {"x": np.full((1, 3), 7, np.float32)}
        many = [ask(batcher, rows(value)) for value in range(4)]
        tasks = await behind_a_gate(model, batcher, many[0], many[1], ask(batcher, wide), many[2], many[3])
        model.gate.set()
        await asyncio.gather(*tasks)
        assert [one.shape for one in model.batches] == [(1, 1), (2, 1), (1, 3), (2, 1)]

    run(body)


def test_quick_model_runs_on_the_loop_and_slow_one_in_a_thread(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        where: list[str] = []

        def noted(arrays: Arrays, wanted: Sequence[str]) -> dict[str, Array]:
            where.append(threading.current_thread().name)
            return model(arrays, wanted)

        batcher, here = Batcher(noted, MERGING, pool), threading.current_thread().name
        model.seconds = 0.002
        for _ in range(3):
            await ask(batcher, rows(1))
        assert here not in where
        model.seconds = 0.0
        for _ in range(40):
            await ask(batcher, rows(1))
        assert where[-1] == here

    run(body)


def test_single_request_does_not_wait_for_the_delay(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=4, delay_seconds=1000), pool)
        assert await ask(batcher, rows(1)) == [2]

    run(body)


def test_requests_under_load_wait_for_the_delay(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        delay = 1.0
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=4, delay_seconds=delay), pool)
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, rows(2)))  # a merged batch means load
        began = time.monotonic()
        early = asyncio.create_task(ask(batcher, rows(3)))
        await asyncio.sleep(0.01)
        assert await together(early, ask(batcher, rows(4))) == [[6], [8]]
        assert time.monotonic() - began >= delay * 0.9
        assert model.rows == [2, 2]

    run(body)


def test_full_batch_does_not_wait_for_the_delay(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=4, delay_seconds=10), pool)
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, rows(2)))
        early = asyncio.create_task(ask(batcher, rows(3)))
        await asyncio.sleep(0.01)
        assert not early.done()
        assert await together(early, ask(batcher, rows(4, 5, 6))) == [[6], [8, 10, 12]]

    run(body)


def test_batches_are_recorded_and_requests_timed(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batches: list[tuple[int, int, float]] = []
        batcher = Batcher(model, MERGING, pool, lambda *batch: batches.append(batch))
        clients = [Client(), Client()]
        await together(ask(batcher, rows(1), request=clients[0]), ask(batcher, rows(2, 3), request=clients[1]))
        ((requests, count, seconds),) = batches
        assert (requests, count) == (2, 3)
        assert seconds >= model.seconds
        assert all(one.received_at <= one.run_started_at <= time.monotonic() for one in clients)

    run(body)


def test_thousand_mixed_requests_get_their_own_rows(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        random = np.random.default_rng(1)
        model.seconds = 0.0
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=16, max_waiting=2000), pool)

        async def one() -> None:
            await asyncio.sleep(float(random.random()) / 50)
            x = random.random((random.integers(1, 20), random.integers(1, 4))).astype(np.float32)
            found = await batcher.outputs({"x": x}, ("y",), Client())
            np.testing.assert_array_equal(found["y"], x * 2)

        await asyncio.gather(*(one() for _ in range(1000)))
        assert len(model.batches) < 1000, "some were merged"

    run(body)


def test_single_request_to_a_quick_model_runs_immediately(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher, model.seconds = Batcher(model, MERGING, pool), 0
        for _ in range(100):  # the first in a thread, as its time is not known; then the shortest counts
            await batcher.outputs(rows(1), ("y",), Client(), is_only=True)
        answered = batcher.outputs(rows(4), ("y",), Client(), is_only=True)
        with pytest.raises(StopIteration) as done:
            answered.send(None)
        assert done.value.value["y"].ravel().tolist() == [8]

    run(body)


def test_single_request_gets_its_error(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher, model.seconds = Batcher(model, MERGING, pool), 0
        await batcher.outputs(rows(1), ("y",), Client(), is_only=True)
        with pytest.raises(ValueError, match="negative: -3"):
            await batcher.outputs(rows(-3), ("y",), Client(), is_only=True)

    run(body)


def test_occasional_interruptions_keep_a_size_quick() -> None:
    estimate = RunTimeEstimate()
    for _ in range(50):
        for seconds in (50e-6, 5e-3, 4e-3, 80e-6):
            estimate.record(7, 1, seconds)
            assert estimate.is_quick(7)


def test_size_that_became_slow_is_not_quick() -> None:
    estimate = RunTimeEstimate()
    estimate.record(7, 1, 50e-6)
    for _ in range(30):
        estimate.record(7, 1, 2e-3)
    assert not estimate.is_quick(7)


def test_sizes_are_estimated_separately() -> None:
    estimate = RunTimeEstimate()
    estimate.record(7, 1, 50e-6)
    assert not estimate.is_quick(8)


def test_long_run_makes_its_size_distrusted() -> None:
    estimate = RunTimeEstimate()
    for size in (5, 6):
        estimate.record(size, 1, 1e-4)
    assert estimate.is_quick(5)
    estimate.record(5, 1, 1.0)
    for _ in range(999):
        estimate.record(5, 1, 1e-4)
        assert not estimate.is_quick(5)
        assert estimate.is_quick(6)
    estimate.record(5, 1, 1e-4)
    assert estimate.is_quick(5)


def test_queue_estimate_includes_the_services_own_work() -> None:
    estimate = RunTimeEstimate()
    for number in range(4):
        estimate.record(5, 10, 0.01)
        estimate.batch_started(10, number * 0.05, more=True)
    assert estimate.queue_seconds(100) == pytest.approx(0.5), "the model itself would take 0.1 s"


def test_queue_estimate_is_forgotten_when_the_queue_is_empty() -> None:
    estimate = RunTimeEstimate()
    estimate.record(5, 10, 0.01)
    estimate.batch_started(10, 0.0, more=True)
    estimate.batch_started(10, 60.0, more=True)
    assert estimate.queue_seconds(1) == pytest.approx(6)
    estimate.batch_started(1, 61.0, more=False)
    estimate.batch_started(1, 99.0, more=True)
    assert estimate.queue_seconds(100) == pytest.approx(0.1)


def test_only_cpu_time_makes_a_run_long() -> None:
    estimate = RunTimeEstimate()
    estimate.record(5, 1, 1e-4, 1e-4)
    estimate.record(5, 1, 1.0, 1e-4)
    assert estimate.is_quick(5), "its CPU time was short"
    estimate.record(5, 1, 1.0, 0.9)
    assert not estimate.is_quick(5)


def test_waiting_for_the_cpu_keeps_a_size_quick() -> None:
    estimate = RunTimeEstimate()
    for _ in range(3):
        estimate.record(5, 1, 0.02, 1e-4)
    assert estimate.is_quick(5)
    assert estimate.queue_seconds(1) == pytest.approx(0.02), "the queue waits for all of it"


def test_cpu_time_of_a_quick_size_is_read_only_after_a_slow_run() -> None:
    estimate = RunTimeEstimate()
    assert estimate.needs_cpu_time(5), "nothing is known of it"
    estimate.record(5, 1, 1e-4, 1e-4)
    assert not estimate.needs_cpu_time(5)
    estimate.record(5, 1, 0.1, None)
    assert estimate.is_quick(5), "another process may have had its turn"
    for _ in range(1000):
        assert estimate.needs_cpu_time(5)
        estimate.record(5, 1, 1e-4, 1e-4)
    assert not estimate.needs_cpu_time(5)


def test_second_long_run_makes_its_size_distrusted() -> None:
    estimate = RunTimeEstimate()
    for _ in range(2):
        estimate.record(5, 1, 1e-4, 1e-4)
        estimate.record(5, 1, 0.1, 0.1 if estimate.needs_cpu_time(5) else None)
    assert not estimate.is_quick(5)
