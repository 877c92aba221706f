"""The body of a request: read whole, within its limit, and refused as soon as it is known to be too large.

Compressed bodies: what `content-encoding` names, undone piece by piece, so that a bomb is refused as it swells.

How long a client waits for its answer, in the three places where it can say so; in seconds, infinity if nowhere.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Send

from pipeline.contract.errors import InvalidPayload
from serve.errors import Busy, Gone, Headers, TooLarge, Unreadable

if TYPE_CHECKING:
    from serve.routes import Answer


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


ACCEPTED = "gzip, deflate"
SLICE_BYTES = 256 << 10  # of plain body are made at once: well under a millisecond of work

_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # as zlib names the formats


class Inflater:
    """Undoes one coding. What it gives is never larger than `SLICE_BYTES` at a time, whatever it is fed."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: Any = zlib.decompressobj(_GZIP) if coding == "gzip" else None
        self._began = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:  # `deflate` is a zlib stream by the standard, and a bare one by many clients
                self._stream = zlib.decompressobj(_ZLIB if data[0] & 0x0F == 8 and data[0] >> 4 < 8 else _RAW)
            elif self._stream.eof:  # gzip files may stand behind one another
                self._stream = self._next()
            self._began = True
            try:
                yield self._stream.decompress(data, SLICE_BYTES)
            except zlib.error as error:
                raise InvalidPayload(f"body: is not valid {self._coding}: {error}") from None
            data = self._stream.unconsumed_tail or self._stream.unused_data

    def end(self) -> None:
        """The body is over; so must be what was compressed."""
        if self._began and not self._stream.eof:
            raise InvalidPayload(f"body: ends in the middle of its {self._coding} data")

    def _next(self) -> Any:
        if self._coding == "gzip":
            return zlib.decompressobj(_GZIP)
        raise InvalidPayload("body: goes on behind the end of its deflate data")


def coding_of(header: bytes) -> str:
    """One coding, or empty for none."""
    name = header.decode("latin-1").strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return ""
    if name in ("gzip", "deflate"):
        return name
    what = "more than one coding" if "," in name else repr(name[:40])
    raise Unreadable(f"content-encoding: {what} is not read here; send one of {ACCEPTED}, or none", _ACCEPT)


_ACCEPT = (b"accept-encoding", ACCEPTED.encode())


HEADER = b"x-request-timeout"
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}  # gRPC's


def of_header(headers: Mapping[bytes, bytes]) -> float:
    """`x-request-timeout`, in seconds."""
    said = headers.get(HEADER)
    if said is None:
        return math.inf
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # nor is NaN
        raise InvalidPayload(f"{HEADER.decode()}: {said[:40].decode('latin-1')!r} is no number of seconds above 0")
    return seconds


def of_parameter(value: Any) -> float:
    """The parameter `timeout` of an inference request: in microseconds, as Triton has it, 0 for none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidPayload(f"parameters: timeout {str(value)[:40]!r} is no whole number of microseconds from 0 on")
    try:
        return value / 1e6 if value else math.inf
    except OverflowError:  # JSON has whole numbers of any length: longer than anybody waits
        return math.inf


def of_call(said: bytes | None) -> float:
    """`grpc-timeout`: up to eight digits and a unit."""
    if said is None:
        return math.inf
    digits, unit = said[:-1], said[-1:]
    if unit not in _UNITS or not digits.isdigit() or len(digits) > 8:
        raise InvalidPayload(f"grpc-timeout: {said[:40].decode('latin-1')!r} is no number of up to 8 digits and a unit")
    return int(digits) * _UNITS[unit]
