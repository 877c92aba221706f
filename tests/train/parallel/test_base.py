"""The stopwatch of the passes, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable

from train.parallel.base import Stopwatch, Traffic


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def stopwatch(clock: Clock, traffic: Traffic) -> Stopwatch:
    stopwatch = Stopwatch(torch.device("cpu"), traffic)
    stopwatch._now = clock.now
    return stopwatch


def test_stopwatch_separates_waiting_from_computing(stopwatch: Stopwatch, traffic: Traffic, clock: Clock) -> None:
    """The backward pass waits in a callback of autograd, as in DistributedDataParallel."""
    for _ in range(2):
        weight = nn.Parameter(torch.ones(3))
        stopwatch.start()
        clock.advance(2.0)
        loss = (weight * 2).sum()
        stopwatch.expect_last_backward(loss)
        register: Any = weight.register_post_accumulate_grad_hook  # it has no types
        register(lambda _: Variable._execution_engine.queue_callback(lambda: clock.advance(5.0)))
        torch.autograd.backward(loss)
        stopwatch.stop()
    assert (traffic.compute_seconds, traffic.exposed_seconds) == (0.0, 0.0), "totals are updated by collect()"
    for _ in range(2):  # the second time adds nothing
        stopwatch.collect()
        assert (traffic.compute_seconds, traffic.exposed_seconds) == (4.0, 10.0)


def test_blocking_exchange_does_not_count_as_computing(stopwatch: Stopwatch, traffic: Traffic, clock: Clock) -> None:
    stopwatch.start()
    clock.advance(1.0)
    loss = nn.Parameter(torch.ones(3)).sum()
    with stopwatch.waiting():
        clock.advance(3.0)
    stopwatch.expect_last_backward(loss)
    torch.autograd.backward(loss)
    stopwatch.stop()
    with stopwatch.waiting():  # after the passes
        clock.advance(4.0)
    stopwatch.collect()
    assert (traffic.compute_seconds, traffic.exposed_seconds) == (1.0, 7.0)


def test_passes_without_an_exchange_are_not_measured(stopwatch: Stopwatch, traffic: Traffic, clock: Clock) -> None:
    stopwatch.start()
    clock.advance(1.0)
    torch.autograd.backward(nn.Parameter(torch.ones(3)).sum())
    stopwatch.stop()
    stopwatch.collect()
    assert traffic == Traffic()
