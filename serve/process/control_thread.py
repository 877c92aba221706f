"""A thread that answers on the health port, whatever the event loop of the predictions does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import uvloop

from serve.wire.listeners import Listener


class ControlThread:
    """Has an event loop of its own; the methods are called in that of the service."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()

    async def listen(self, make_listener: Callable[[], Listener[Any]]) -> None:
        """Serve the listener that `make_listener` returns in the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(make_listener), self._loop))

    async def stop(self, grace_seconds: float) -> None:
        """Let the listener answer what it has received, and end the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listener.stop(grace_seconds), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _listen(self, make_listener: Callable[[], Listener[Any]]) -> None:
        self._listener = make_listener()
        await self._listener.start()
