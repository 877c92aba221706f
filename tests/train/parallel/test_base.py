from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from train.parallel.base import Stopwatch, Traffic

WAIT, WORK = 0.05, 0.02


def step(stopwatch: Stopwatch, work: float) -> None:
    """A step that works, and then waits in a callback of autograd as DistributedDataParallel does."""
    weight = nn.Parameter(torch.ones(3))
    stopwatch.start()
    time.sleep(work)
    loss = (weight * 2).sum()
    stopwatch.expect_last_backward(loss)
    engine = Variable._execution_engine
    register: Any = weight.register_post_accumulate_grad_hook  # published without types
    register(lambda _: engine.queue_callback(lambda: time.sleep(WAIT)))
    torch.autograd.backward(loss)
    stopwatch.stop()


def test_stopwatch_separates_waiting_from_computing() -> None:
    traffic = Traffic()
    stopwatch = Stopwatch(torch.device("cpu"), traffic)
    began = time.perf_counter()
    for _ in range(2):
        step(stopwatch, WORK)
    elapsed = time.perf_counter() - began
    assert (traffic.compute_seconds, traffic.exposed_seconds) == (0.0, 0.0), "totals are updated by collect()"
    stopwatch.collect()
    assert 2 * WAIT <= traffic.exposed_seconds <= elapsed - 2 * WORK
    assert 2 * WORK <= traffic.compute_seconds <= elapsed - 2 * WAIT
    before = traffic.exposed_seconds
    stopwatch.collect()
    assert traffic.exposed_seconds == before, "nothing counts twice"


def test_blocking_exchange_does_not_count_as_computing() -> None:
    traffic = Traffic()
    stopwatch = Stopwatch(torch.device("cpu"), traffic)
    began = time.perf_counter()
    stopwatch.start()
    loss = nn.Parameter(torch.ones(3)).sum()
    with stopwatch.waiting():
        time.sleep(WAIT)
    stopwatch.expect_last_backward(loss)
    torch.autograd.backward(loss)
    stopwatch.stop()
    with stopwatch.waiting():  # after the passes: of their time nothing is taken
        time.sleep(WAIT)
    stopwatch.collect()
    assert traffic.exposed_seconds >= 2 * WAIT
    assert 0 <= traffic.compute_seconds <= time.perf_counter() - began - 2 * WAIT


def test_passes_without_an_exchange_are_not_measured() -> None:
    traffic = Traffic()
    stopwatch = Stopwatch(torch.device("cpu"), traffic)
    stopwatch.start()
    torch.autograd.backward(nn.Parameter(torch.ones(3)).sum())
    stopwatch.stop()
    stopwatch.collect()
    assert traffic == Traffic()
