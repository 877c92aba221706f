"""The header fields of an HTTP/2 request: what makes them malformed (RFC 9113, 8.2 and 8.3), and what they say."""

from __future__ import annotations

import re
from collections.abc import Iterable

from serve.http2.frames import Code, StreamFault
from serve.http2.hpack import Field

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
