"""A model that doubles its input, for tests of batching and queues."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from pipeline.contract.codec import Array, Arrays
from serve.load_shedding import check_capacity
from serve.request_context import RequestContext
from serve.runtime.batcher import Batcher, BatchingOptions

MERGING = BatchingOptions(mergeable=True, max_rows=8, max_waiting=64)


class Model:
    """Doubles `x`, row by row. A batch waits while the gate is closed; a negative value is refused."""

    def __init__(self) -> None:
        self.batches: list[Array] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.seconds = 0.001  # too slow to be run on the event loop
        self.busy = 0.0

    def __call__(self, arrays: Arrays, wanted: Sequence[str]) -> dict[str, Array]:
        self.batches.append(arrays["x"])
        self.entered.set()
        assert self.gate.wait(300)
        if self.seconds:
            began = time.monotonic()
            time.sleep(self.seconds)
            self.busy += time.monotonic() - began
        if (arrays["x"] < 0).any():
            raise ValueError(f"negative: {arrays['x'].min()}")
        return dict.fromkeys(wanted, arrays["x"] * 2)

    @property
    def rows(self) -> list[int]:
        return [len(one) for one in self.batches]

    async def until_entered(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.entered.wait, 20)
        self.entered.clear()


def rows(*values: float) -> Arrays:
    return {"x": np.array(values, np.float32)[:, None]}


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 300))


class Client(RequestContext):
    """A request whose deadline and disconnection a test controls."""

    def __init__(self, deadline: float = math.inf, gone: Callable[[], bool] = lambda: False) -> None:
        super().__init__({}, "/")
        self.deadline, self.is_disconnected = deadline, gone  # type: ignore[method-assign]


async def ask(
    batcher: Batcher, arrays: Arrays, *names: str, request: RequestContext | None = None, **output: Any
) -> Any:
    """Return the outputs as a list of numbers; raise Busy if the queue is full."""
    request = request or Client(**output)
    check_capacity(batcher, request.deadline)
    outputs = await batcher.outputs(arrays, names or ("y",), request)
    return [float(value) for array in outputs.values() for value in array.ravel()]


async def behind_a_gate(model: Model, batcher: Batcher, *waiting: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start a request that cannot end, and queue the given ones behind it."""
    model.gate.clear()
    first = asyncio.create_task(ask(batcher, rows(100)))
    await model.until_entered()
    tasks = [first, *map(asyncio.create_task, waiting)]
    await asyncio.sleep(0)
    return tasks


async def together(*sent: Awaitable[list[float]]) -> list[list[float]]:
    return [*await asyncio.gather(*sent)]


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.gate.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool
