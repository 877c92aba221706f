"""The body of a request: read whole, within its limit, and refused as soon as it is known to be too large."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.types import Message, Receive, Send

from serve.coding import SLICE_BYTES, Inflater, coding_of
from serve.refusal import Busy, Gone, Headers, TooLarge

if TYPE_CHECKING:
    from serve.asked import Answer

Hold = Callable[[int, int], None]

_LINGER_SECONDS = 2.0
_BODIES = 4  # of the largest size may be in memory at once

log = logging.getLogger(__name__)


def _nothing(_size: int, _most: int) -> None:
    """Where nobody counts."""


class Room:
    """For bodies that come in several pieces: many large ones at once must not take the memory of the machine."""

    def __init__(self) -> None:
        self.held = 0

    def take(self, size: int, most: int) -> None:
        """Room for this many bytes more of a body that may have `most` of them in all."""
        if self.held + size > _BODIES * most:
            raise Busy(f"other requests' bodies take {self.held} bytes already; try again in a moment")
        self.held += size


async def read(headers: dict[bytes, bytes], receive: Receive, most: int, hold: Hold = _nothing) -> bytes:
    """The whole of it, decompressed. Neither as sent nor as it is then may it be larger than `most` bytes.

    `hold` is told of the bytes that are about to be kept, and may refuse them; not of a body in one piece.
    """
    if int(headers.get(b"content-length", b"0")) > most:  # what is no number was refused before
        raise _too_large(most)
    coding = coding_of(headers.get(b"content-encoding", b""))
    if coding:
        return await _inflated(receive, most, Inflater(coding), hold)
    message = await receive()
    if not message.get("more_body", False) and message["type"] == "http.request":
        body: bytes = message["body"]
        if len(body) > most:
            raise _too_large(most, more=False)
        return body
    return b"".join([chunk async for chunk in _chunks(message, receive, most, hold)])


async def _chunks(message: Message, receive: Receive, most: int, hold: Hold) -> AsyncIterator[bytes]:
    """The body as it is sent, from this message on."""
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise Gone("the client hung up in the middle of its request")
        chunk: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > most:
            raise _too_large(most, more=more)
        hold(len(chunk), most)
        yield chunk
        if not more:
            return
        message = await receive()


async def _inflated(receive: Receive, most: int, inflater: Inflater, hold: Hold) -> bytes:
    parts, size = [], 0
    message = await receive()
    async for chunk in _chunks(message, receive, most, hold):
        for part in inflater.feed(chunk):
            hold(len(part), most)
            parts.append(part)
            size += len(part)
            if size > most:
                raise _too_large(most, what="body: decompressed it is")
            if len(part) == SLICE_BYTES:
                await asyncio.sleep(0)  # there may be much of it, and others are to be served
    inflater.end()
    return b"".join(parts)


async def linger(receive: Receive, send: Send, answer: Answer, identity: Headers, *, more: bool) -> None:
    """Answer, then read on for a moment: closing on unread bytes would reset the connection and lose the answer."""
    size = (b"content-length", b"%d" % len(answer.body))
    headers = [*answer.headers, *identity, size, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": True})
    try:
        async with asyncio.timeout(_LINGER_SECONDS):
            while more:
                more = (await receive()).get("more_body", False)
    except TimeoutError:
        log.info("a client did not stop sending a body that was refused; closing its connection")
    await send({"type": "http.response.body", "body": b""})


def _too_large(most: int, *, more: bool = True, what: str = "body:") -> TooLarge:
    """`more` of the body is, or may be, still to come."""
    found = TooLarge(f"{what} larger than the limit of {most} bytes")
    found.more = more
    return found
