"""Whether a batch is quick, whatever else the machine is at."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serve.runtime.batcher import Array, Arrays, Batcher, RunTimeEstimate, BatchingOptions
from tests.serve.doubling import MERGING, Client, Model, ask, behind_a_gate, rows, run, together


def test_requests_that_wait_together_run_as_one_and_each_gets_its_own_rows(
    model: Model, pool: ThreadPoolExecutor
) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        found = await together(ask(batcher, rows(1)), ask(batcher, rows(2, 3)), ask(batcher, rows(4, 5, 6)))
        assert found == [[2], [4, 6], [8, 10, 12]]
        assert model.rows == [6]

    run(body)


def test_a_batch_is_never_larger_than_stated_unless_one_request_is(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        sizes = [5, 3, 1, 20, 2, 7]
        found = await together(*(ask(batcher, rows(*range(size))) for size in sizes))
        assert found == [[2 * value for value in range(size)] for size in sizes]
        assert model.rows == [8, 1, 20, 2, 7]

    run(body)


def test_a_model_whose_rows_are_not_its_own_gets_one_request_at_a_time(model: Model, pool: ThreadPoolExecutor) -> None:
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
def test_what_differs_is_never_mixed(
    model: Model, pool: ThreadPoolExecutor, other: Arrays, wanted: tuple[str, ...]
) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, other, *wanted), ask(batcher, rows(2)))
        assert model.rows == [2, 1]

    run(body)


def test_one_bad_request_spoils_none_of_its_neighbours(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        asked = (ask(batcher, rows(value)) for value in (1, 2, 3, -7, 5, 6, 7, 8))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert found[:3] + found[4:] == [[2], [4], [6], [10], [12], [14], [16]]
        assert isinstance(found[3], ValueError)
        assert "negative: -7" in str(found[3])
        assert model.rows == [8, 4, 2, 2, 1, 1, 4], "by halves, not one by one"
        assert await ask(batcher, rows(9)) == [18]

    run(body)


def test_outputs_that_are_not_a_row_for_each_row_are_requested_alone(pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(lambda arrays, _: {"y": arrays["x"].sum(axis=0)}, MERGING, pool)
        assert await together(ask(batcher, rows(1)), ask(batcher, rows(2, 3))) == [[1], [5]]

    run(body)


def test_anyone_who_is_cancelled_while_it_runs_harms_no_one(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, MERGING, pool)
        model.gate.clear()
        one, other = asyncio.create_task(ask(batcher, rows(1))), asyncio.create_task(ask(batcher, rows(2)))
        await model.until_entered()
        one.cancel()
        model.gate.set()
        assert await other == [4]

    run(body)


def test_lanes_are_served_in_the_order_of_who_waits_longest(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=2), pool)
        wide = {"x": np.full((1, 3), 7, np.float32)}
        many = [ask(batcher, rows(value)) for value in range(4)]
        tasks = await behind_a_gate(model, batcher, many[0], many[1], ask(batcher, wide), many[2], many[3])
        model.gate.set()
        await asyncio.gather(*tasks)
        assert [one.shape for one in model.batches] == [(1, 1), (2, 1), (1, 3), (2, 1)]

    run(body)


def test_a_quick_model_runs_on_the_loop_and_a_slow_one_in_a_thread(model: Model, pool: ThreadPoolExecutor) -> None:
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


def test_no_one_waits_for_company_when_idle_and_all_do_under_load(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        delay = 0.6
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=4, delay_seconds=delay), pool)
        began = time.monotonic()
        await ask(batcher, rows(1))
        assert time.monotonic() - began < delay / 2, "alone"
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, rows(2)))  # load
        began = time.monotonic()
        early = asyncio.create_task(ask(batcher, rows(3)))
        await asyncio.sleep(delay / 5)
        assert await together(early, ask(batcher, rows(4))) == [[6], [8]]
        assert time.monotonic() - began >= delay * 0.9
        assert model.rows == [1, 2, 2]
        began = time.monotonic()
        await asyncio.gather(*(ask(batcher, rows(value)) for value in range(4)))
        assert time.monotonic() - began < delay / 2, "a batch that is full starts at once"

    run(body)


def test_a_batch_that_fills_up_while_it_waits_for_company_starts(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher = Batcher(model, BatchingOptions(mergeable=True, max_rows=4, delay_seconds=10), pool)
        await asyncio.gather(ask(batcher, rows(1)), ask(batcher, rows(2)))
        early = asyncio.create_task(ask(batcher, rows(3)))
        await asyncio.sleep(0.01)
        assert not early.done()
        assert await together(early, ask(batcher, rows(4, 5, 6))) == [[6], [8, 10, 12]]

    run(body)


def test_each_batch_is_counted_and_each_request_knows_when_it_was_taken(model: Model, pool: ThreadPoolExecutor) -> None:
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


def test_a_thousand_requests_of_any_size_and_shape_get_exactly_their_own(
    model: Model, pool: ThreadPoolExecutor
) -> None:
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


def test_who_is_alone_is_answered_without_a_turn_of_the_loop_once_the_model_is_known_to_be_quick(
    model: Model, pool: ThreadPoolExecutor
) -> None:
    async def body() -> None:
        batcher, model.seconds = Batcher(model, MERGING, pool), 0
        await batcher.outputs(rows(1), ("y",), Client(), is_only=True)  # in a thread: nobody knows yet how long it takes
        answered = batcher.outputs(rows(4), ("y",), Client(), is_only=True)
        with pytest.raises(StopIteration) as done:
            answered.send(None)
        assert done.value.value["y"].ravel().tolist() == [8]

    run(body)


def test_an_error_reaches_who_is_alone(model: Model, pool: ThreadPoolExecutor) -> None:
    async def body() -> None:
        batcher, model.seconds = Batcher(model, MERGING, pool), 0
        await batcher.outputs(rows(1), ("y",), Client(), is_only=True)
        with pytest.raises(ValueError, match="negative: -3"):
            await batcher.outputs(rows(-3), ("y",), Client(), is_only=True)

    run(body)


def test_what_never_ran_is_not_quick() -> None:
    assert not RunTimeEstimate().is_quick(7)


def test_a_batch_that_was_interrupted_now_and_then_stays_quick() -> None:
    estimate = RunTimeEstimate()
    for _ in range(50):
        for seconds in (50e-6, 5e-3, 4e-3, 80e-6):
            estimate.record(7, 1, seconds)
            assert estimate.is_quick(7)


def test_a_batch_that_became_slow_is_quick_no_more() -> None:
    estimate = RunTimeEstimate()
    estimate.record(7, 1, 50e-6)
    for _ in range(30):
        estimate.record(7, 1, 2e-3)
    assert not estimate.is_quick(7)


def test_sizes_are_known_apart() -> None:
    estimate = RunTimeEstimate()
    estimate.record(7, 1, 50e-6)
    assert not estimate.is_quick(8)


def test_one_long_run_makes_its_size_unsafe_for_the_event_loop_and_no_other() -> None:
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


def test_a_turn_of_another_process_is_no_reason_for_a_thread() -> None:
    estimate = RunTimeEstimate()
    estimate.record(5, 1, 1e-4)
    estimate.record(5, 1, 0.01)
    assert estimate.is_quick(5)


def test_a_queue_lasts_as_long_as_all_of_the_service_takes_for_a_batch() -> None:
    estimate = RunTimeEstimate()
    for number in range(4):
        estimate.record(5, 10, 0.01)
        estimate.batch_started(10, number * 0.05, more=True)
    assert estimate.queue_seconds(100) == pytest.approx(0.5), "the model alone would take 0.1 s"


def test_what_a_queue_took_is_forgotten_when_no_one_waits() -> None:
    estimate = RunTimeEstimate()
    estimate.record(5, 10, 0.01)
    estimate.batch_started(10, 0.0, more=True)
    estimate.batch_started(10, 60.0, more=True)
    assert estimate.queue_seconds(1) == pytest.approx(6)
    estimate.batch_started(1, 61.0, more=False)
    estimate.batch_started(1, 99.0, more=True)
    assert estimate.queue_seconds(100) == pytest.approx(0.1)


def test_a_long_turn_of_another_process_is_no_long_run() -> None:
    estimate = RunTimeEstimate()
    estimate.record(5, 1, 1e-4, 1e-4)
    estimate.record(5, 1, 1.0, 1e-4)
    assert estimate.is_quick(5), "it had the processor for a moment only"
    estimate.record(5, 1, 1.0, 0.9)
    assert not estimate.is_quick(5)


def test_a_run_that_waits_for_its_turn_in_a_thread_is_known_to_be_quick() -> None:
    estimate = RunTimeEstimate()
    for _ in range(3):
        estimate.record(5, 1, 0.02, 1e-4)
    assert estimate.is_quick(5)
    assert estimate.queue_seconds(1) == pytest.approx(0.02), "who waits for it waits for all of it"
