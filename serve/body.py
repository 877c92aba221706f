"""The body of a request: read whole, within its limit, and refused as soon as it is known to be too large."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from starlette.types import Receive, Send

from serve.refusal import Gone, Headers, TooLarge, Unreadable

if TYPE_CHECKING:
    from serve.app import Answer

_LINGER_SECONDS = 2.0

log = logging.getLogger(__name__)


async def read(headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes:
    if (coding := headers.get(b"content-encoding")) not in (None, b"identity"):
        raise Unreadable(f"content-encoding: {coding!r} is not supported")
    if int(headers.get(b"content-length", b"0")) > most:  # uvicorn has refused what is no number
        raise _too_large(most)
    message = await receive()
    chunks, size = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise Gone("the client hung up in the middle of its request")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > most:
            raise _too_large(most, more=message.get("more_body", False))
        if not message.get("more_body", False):
            return b"".join(chunks) if len(chunks) > 1 else chunks[0]
        message = await receive()


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


def _too_large(most: int, *, more: bool = True) -> TooLarge:
    """`more` of the body is still to come."""
    found = TooLarge(f"body: larger than the limit of {most} bytes")
    found.more = more
    return found
