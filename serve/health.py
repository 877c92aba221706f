"""Liveness and readiness on a port of their own, answered by a thread: no load on the other ports delays them.

The service is live as long as its event loop makes turns, so that a probe also notices one that is stuck.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

import orjson
import uvloop

from serve.http1.connection import Application, HttpRequest
from serve.routes import JSON, PATHS

_BEAT_SECONDS = 1.0
_STUCK_SECONDS = 10.0  # without a turn of the event loop
_LIVE, _READY = PATHS["live"][0], PATHS["ready"][0]


class Listener(Protocol):
    listening: asyncio.Event

    async def run_until_stopped(self) -> None: ...
    def stop(self) -> None: ...


class HealthPort:
    """The thread and the application of its listener; made and stopped in the event loop of the service."""

    def __init__(self, listen: Callable[[Application], Listener], is_ready: Callable[[], bool]) -> None:
        """`listen` makes the listener, in the thread."""
        self._listen, self._is_ready = listen, is_ready
        self._turned_at = time.monotonic()
        self._beating = asyncio.create_task(self._beat())
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        await asyncio.to_thread(self._listening.wait)

    async def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._listener.stop)
        await asyncio.to_thread(self._thread.join)
        self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(_BEAT_SECONDS)

    # In the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._listener = asyncio.get_running_loop(), self._listen(self)
        serving = asyncio.create_task(self._listener.run_until_stopped())
        await self._listener.listening.wait()
        self._listening.set()
        await serving

    def begin(self, request: HttpRequest) -> None:
        """Answer the two paths of the Open Inference Protocol, and no other."""
        live = time.monotonic() - self._turned_at < _STUCK_SECONDS
        ready = live and self._is_ready()
        body: dict[str, bool] | dict[str, str]
        answers = {_LIVE: (live, {"live": live}), _READY: (ready, {"ready": ready, "live": live})}
        if request.method not in ("GET", "HEAD") or request.path not in answers:
            status, body = HTTPStatus.NOT_FOUND, {"error": f"only GET {_LIVE} and {_READY} are here"}
        else:
            healthy, body = answers[request.path]
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        request.respond_now(status, (JSON,), orjson.dumps(body))
