"""A thread that answers on the health port, whatever the event loop of the predictions does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

import uvloop


class Listener(Protocol):
    listening: asyncio.Event

    async def run_until_stopped(self) -> None: ...
    def stop(self) -> None: ...


class ControlThread:
    """Has an event loop of its own; the methods are called in that of the service."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()
        self._serving: dict[Listener, asyncio.Task[None]] = {}

    async def listen(self, make_listener: Callable[[], Listener]) -> None:
        """Serve the listener that `make_listener` returns in the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(make_listener), self._loop))

    async def stop(self) -> None:
        """Let the listeners answer what they have received, and end the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._stop(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    # In the thread

    async def _listen(self, make_listener: Callable[[], Listener]) -> None:
        listener = make_listener()
        self._serving[listener] = asyncio.create_task(listener.run_until_stopped())
        await listener.listening.wait()

    async def _stop(self) -> None:
        for listener in self._serving:
            listener.stop()
        await asyncio.gather(*self._serving.values())
