"""Liveness, readiness and status on a port of their own; a service is live as long as its event loop makes turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

import orjson

from serve.routes import JSON, PATHS
from serve.wire.http1 import Request

BEAT_SECONDS = 0.5
STUCK_SECONDS = 10.0  # without a turn of the event loop
_LIVE, _READY = PATHS["live"][0], PATHS["ready"][0]
STATUS = "/status"


class Health:
    """The application of the health port."""

    request_class = Request

    def __init__(
        self, is_live: Callable[[], bool], is_ready: Callable[[], bool], status: Callable[[], Awaitable[Any]]
    ) -> None:
        self._is_live, self._is_ready, self._status = is_live, is_ready, status

    def begin(self, request: Request) -> Coroutine[Any, Any, None] | None:
        """Answer the two paths of the Open Inference Protocol, and the versions with their roles."""
        if request.method == "GET" and request.path == STATUS:
            return self._answer_status(request)
        live = self._is_live()
        ready = live and self._is_ready()
        body: dict[str, bool] | dict[str, str]
        answers = {_LIVE: (live, {"live": live}), _READY: (ready, {"ready": ready, "live": live})}
        if request.method not in ("GET", "HEAD") or request.path not in answers:
            status, body = HTTPStatus.NOT_FOUND, {"error": f"only GET {_LIVE}, {_READY} and {STATUS} are here"}
        else:
            healthy, body = answers[request.path]
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        request.respond_now(status, (JSON,), orjson.dumps(body))
        return None

    async def _answer_status(self, request: Request) -> None:
        await request.respond(HTTPStatus.OK, (JSON,), orjson.dumps(await self._status()))


async def beat(note: Callable[[float], None]) -> None:
    """Note the time whenever the event loop has made a turn, until cancelled."""
    while True:
        note(time.monotonic())
        await asyncio.sleep(BEAT_SECONDS)


class Heartbeat:
    """Whether the event loop in which it was started makes turns; any thread may ask."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._beating = asyncio.create_task(beat(self._note))

    def is_live(self) -> bool:
        return time.monotonic() - self._turned_at < STUCK_SECONDS

    def stop(self) -> None:
        self._beating.cancel()

    def _note(self, now: float) -> None:
        self._turned_at = now
