"""How gRPC wraps its messages into HTTP/2: five bytes before each, the status behind it, codings and deadlines."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence

from serve.coding import SLICE_BYTES, Inflater
from serve.http2 import hpack
from serve.refusal import Refusal, TooLarge, Unoffered

CODINGS = b"identity, deflate, gzip"
_PREFIX = struct.Struct(">BI")  # whether it is compressed, and its length
_NAMES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED "
    "RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS "
    "UNAUTHENTICATED"
)
_CODES = {name: b"%d" % number for number, name in enumerate(_NAMES.split())}
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

ANSWER = hpack.status(200) + hpack.literals(
    ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", CODINGS))
)
OK = hpack.literals(((b"grpc-status", b"0"),))


class Unwrapped(Refusal):
    """The bytes of a call are not one message."""

    reason = "wire"


def wrap(message: bytes) -> bytes:
    return _PREFIX.pack(0, len(message)) + message


def check_size(parts: Sequence[bytes], size: int, most: int) -> None:
    """As soon as five bytes are here they say how long the message will be."""
    declared = 0
    if size >= _PREFIX.size:
        first = parts[0] if len(parts[0]) >= _PREFIX.size else b"".join(parts[: _PREFIX.size])
        declared = int.from_bytes(first[1:5], "big")
    if declared > most or size > most + _PREFIX.size:
        raise too_large(max(declared, size - _PREFIX.size), most)


def too_large(size: int, most: int) -> TooLarge:
    return TooLarge(f"message: of {size} bytes, it is larger than max, which is {most} bytes")


def unwrap(body: bytes, most: int) -> tuple[bytes, bool]:
    """The one message of a call, and whether it is compressed."""
    if len(body) < _PREFIX.size:
        if body:
            raise Unwrapped(f"message: ends after {len(body)} bytes, in the middle of its prefix")
        raise Unoffered("message: none came; every method here asks for one")
    compressed, size = _PREFIX.unpack_from(body)
    if size > most:
        raise too_large(size, most)
    if size > len(body) - _PREFIX.size:
        raise Unwrapped(f"message: ends after {len(body) - _PREFIX.size} of its {size} bytes")
    if size < len(body) - _PREFIX.size:
        raise Unoffered("message: more than one came; no method here reads a stream of them")
    if compressed > 1:
        raise Unwrapped(f"message: its first byte is 0 or 1, not {compressed}")
    return body[_PREFIX.size :], bool(compressed)


async def inflated(data: bytes, coding: str, most: int) -> bytes:
    """Decompressed, a slice at a time."""
    if not coding:
        raise Unwrapped("message: says that it is compressed, and grpc-encoding does not say how")
    parts, size, inflater = [], 0, Inflater(coding)
    for part in inflater.feed(data):
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLarge(f"message: decompressed it is larger than max, which is {most} bytes")
        if len(part) == SLICE_BYTES:
            await asyncio.sleep(0)  # there may be much of it, and others are to be served
    inflater.end()
    return b"".join(parts)


def coding_of(said: bytes | None) -> str:
    """What `grpc-encoding` names; empty for none."""
    name = (said or b"identity").decode("latin-1")
    if name == "identity":
        return ""
    if name in ("gzip", "deflate"):
        return name
    raise Unoffered(f"grpc-encoding: {name[:40]!r} is not read here; send one of {CODINGS.decode()}")


def failure(code: str, text: str) -> bytes:
    """The fields of a status that is not OK."""
    return hpack.literals(((b"grpc-status", _CODES[code]), (b"grpc-message", escaped(text))))


def escaped(text: str) -> bytes:
    """As gRPC writes texts into a header."""
    data = text.encode(errors="replace")
    if _PLAIN.issuperset(data):
        return data
    return b"".join([b"%c" % byte if byte in _PLAIN else b"%%%02X" % byte for byte in data])
