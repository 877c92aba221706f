"""The heads of one HTTP/2 connection: put together, decoded, checked, and remembered by their bytes.

A client's table is soon warm, and from then on it says the same in the same few bytes.

The header fields of an HTTP/2 request: what makes them malformed (RFC 9113, 8.2 and 8.3), and what they say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import END_HEADERS, PRIORITIZED, Code, ConnectionFault, StreamFault
from serve.grpc.http2.hpack import Decoder, Field

MOST_LIST_BYTES = 32 << 10  # of header fields, with 32 more for each
_MOST_BLOCK_BYTES = 128 << 10  # as they are sent; what is too long for us is still read, so that it can be answered
_MOST_PIECES = 64
_KNOWN, _KNOWN_BYTES = 16, 1024  # heads that are remembered, and how long each is at most

Meaning = tuple[Any, int | None]  # what the application makes of it, and how long its body is said to be
Whole = tuple[int, int, bytes]  # stream, flags, block


class Heads:
    """`understand` is told the fields, or None where they are too many."""

    def __init__(self, understand: Callable[[dict[bytes, bytes] | None], Any]) -> None:
        self._understand = understand
        self._decoder = Decoder(MOST_LIST_BYTES)
        self._known: dict[bytes, Meaning] = {}
        self._changes = 0  # of the decoder's table, when those were learnt
        self._pieces: list[bytes] = []  # of a head that is not whole
        self._stream_id = self._flags = 0

    @property
    def open(self) -> bool:
        return bool(self._stream_id)

    def begin(self, stream_id: int, flags: int, payload: bytes) -> Whole | None:
        """A HEADERS frame; None where more is to come."""
        if not stream_id & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"a client opens no stream {stream_id}")
        payload = frames.unpadded(flags, payload)
        if flags & PRIORITIZED:
            if len(payload) < frames.PRIORITY_BYTES:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "HEADERS too short for the priority they tell")
            payload = payload[frames.PRIORITY_BYTES :]
        if flags & END_HEADERS:
            return stream_id, flags, payload
        self._stream_id, self._flags, self._pieces = stream_id, flags, [payload]
        return None

    def go_on(self, stream_id: int, flags: int, payload: bytes) -> Whole | None:
        """A CONTINUATION frame."""
        if not self.open or self._stream_id != stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of no head")
        self._pieces.append(payload)
        if len(self._pieces) > _MOST_PIECES or sum(map(len, self._pieces)) > _MOST_BLOCK_BYTES:
            raise ConnectionFault(
                Code.ENHANCE_YOUR_CALM, f"a head of more than {_MOST_BLOCK_BYTES} bytes, or in crumbs"
            )
        if not flags & END_HEADERS:
            return None
        whole = stream_id, self._flags, b"".join(self._pieces)
        self._stream_id, self._pieces = 0, []
        return whole

    def read(self, block: bytes) -> Meaning:
        """Of a request."""
        return self._known.get(block) or self._learn(block)

    def skip(self, block: bytes) -> Sequence[Field]:
        """Of trailers, which mean nothing; but they may change the table."""
        fields = self._decoder.decode(block)
        self._forget()
        return fields or ()

    def _learn(self, block: bytes) -> Meaning:
        fields = self._decoder.decode(block)
        told = self._decoder.changes != self._changes
        self._forget()
        if fields is None:
            return self._understand(None), None
        request = request_of(fields)
        meaning = self._understand(request), length_of(request)
        if not told and len(block) <= _KNOWN_BYTES:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known[block] = meaning
        return meaning

    def _forget(self) -> None:
        """What the same bytes meant before the table changed."""
        if self._decoder.changes != self._changes:
            self._changes = self._decoder.changes
            self._known.clear()


_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_WANTED = (b":method", b":scheme", b":path")
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NEVER = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]\Z")  # in a value


def request_of(fields: Iterable[Field]) -> dict[bytes, bytes]:
    """All of them by name, checked; of a name that comes twice the last."""
    found: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name not in _PSEUDO or name in found:
                raise _malformed(f"the field {name[:40]!r} stands where it must not, or twice, or is none")
        else:
            regular = True
            check(name, value)
        if _NEVER.search(value):
            raise _malformed(f"the field {name[:40]!r} has a value that no field may have")
        found[name] = value
    if missing := [name.decode() for name in _WANTED if not found.get(name)]:
        raise _malformed(f"the request has no {' and no '.join(missing)}")
    return found


def check(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise _malformed(f"{name[:40]!r} is no name of a field")
    if name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise _malformed(f"the field {name.decode()} is not one of HTTP/2")


def check_trailers(fields: Iterable[Field]) -> None:
    for name, value in fields:
        check(name, value)  # which no pseudo-header passes


def length_of(found: dict[bytes, bytes]) -> int | None:
    """How many bytes the request says it has; None where it does not say."""
    said = found.get(b"content-length")
    if said is None:
        return None
    if not said.isdigit() or len(said) > 15:
        raise _malformed(f"content-length: {said[:40]!r} is no number of bytes")
    return int(said)


def _malformed(text: str) -> StreamFault:
    return StreamFault(Code.PROTOCOL_ERROR, text)
