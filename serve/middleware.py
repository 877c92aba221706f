"""Around every HTTP request: a bound on its body, a count of it, and an opaque answer when we fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.metrics import Metrics, Outcome

_LINGER_SECONDS = 2.0
INTERNAL = "internal error; the server's log has the details"

log = logging.getLogger(__name__)


class Envelope:
    """A plain ASGI layer: reads the body whole, within its limit, before the application sees the request."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, metrics: Metrics, draining: Callable[[], bool]) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.metrics = metrics
        self.draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif (protocol := protocol_of(scope)) is None:
            await self._answer(scope, receive, send, Outcome())
        else:
            with self.metrics.request(protocol) as outcome:
                await self._answer(scope, receive, send, outcome)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, outcome: Outcome) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                outcome.code = str(message["status"])
                if self.draining():  # the client's next request belongs to another process
                    message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
            await send(message)

        try:
            body = await self._read(scope, receive)
            await self.app(scope, _replay(body, receive), watched)
        except _TooLarge as error:
            await self._refuse(receive, watched, more=error.more)
        except _Gone:
            return
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await _send_error(watched, HTTPStatus.INTERNAL_SERVER_ERROR, INTERNAL)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, refused as soon as it is known to be too large."""
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if int(said) > self.max_body_bytes:  # uvicorn has refused what is no number
            raise _TooLarge(more=True)
        chunks, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
            if size > self.max_body_bytes:
                raise _TooLarge(more=more)
        return b"".join(chunks)

    async def _refuse(self, receive: Receive, send: Send, *, more: bool) -> None:
        """413, then read on for a moment: closing on unread bytes would reset the connection and lose the answer."""
        text = f"body: larger than the limit of {self.max_body_bytes} bytes"
        await _send_error(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text, close=True, more=True)
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                while more:
                    more = (await receive()).get("more_body", False)
        except TimeoutError:
            log.info("a client did not stop sending a body that was refused; closing its connection")
        await send({"type": "http.response.body", "body": b""})


class _TooLarge(Exception):
    """The body exceeds its limit; `more` of it is still to come."""

    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.more = more


class _Gone(Exception):
    """The client hung up in the middle of its request."""


def protocol_of(scope: Scope) -> str | None:
    """v1 or v2 for a prediction, None for everything else."""
    path: str = scope["path"]
    if scope["method"] != "POST":
        return None
    if path.startswith("/v1/models/") and path.endswith(":predict"):
        return "v1"
    return "v2" if path.startswith("/v2/models/") and path.endswith("/infer") else None


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _send_error(send: Send, status: HTTPStatus, text: str, *, close: bool = False, more: bool = False) -> None:
    body = orjson.dumps({"error": text})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more})
