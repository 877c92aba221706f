"""Header blocks of an HTTP/2 connection: assembly, decoding, validation (RFC 9113, 8.2 and 8.3) and a cache.

Once a client's HPACK table is warm, it sends the same few bytes for the same request headers: these are decoded once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from serve.wire.connection_limits import MAX_BLOCK_BYTES, MAX_BLOCK_FRAMES, MAX_HEAD_BYTES
from serve.wire.http2 import frames
from serve.wire.http2.frames import END_HEADERS, PRIORITY_FLAG, ConnectionFault, ErrorCode, StreamFault
from serve.wire.http2.hpack import Decoder, Field, HpackBomb, HpackError

_CACHED_BLOCKS, _CACHED_BLOCK_BYTES = 16, 1024

ParsedHead = tuple[Any, int | None]  # what Application.parse_head returned, and the content-length
HeaderBlock = tuple[int, int, bytes]  # stream id, flags, encoded fields


class HeaderReader:
    """Header blocks of one connection. `parse_head` gets the fields, or None where they exceed the limit.

    `pay` is called with the number of fields of each block that is decoded, and its encoded bytes.
    """

    def __init__(
        self, parse_head: Callable[[dict[bytes, bytes] | None], Any], pay: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._parse_head, self._pay = parse_head, pay
        self._decoder = Decoder(MAX_HEAD_BYTES)
        self._cache: dict[bytes, ParsedHead] = {}
        self._table_version = 0  # of the decoder, when the cache was filled
        self._fragments: list[bytes] = []  # of a block that is not complete
        self._fragment_bytes = self._stream_id = self._flags = 0

    @property
    def is_open(self) -> bool:
        """A block has begun and is not complete."""
        return bool(self._stream_id)

    def add_headers(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        """Take a HEADERS frame; return None where CONTINUATION has to follow."""
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"a client must not open stream {stream_id}")
        payload = frames.strip_padding(flags, payload)
        if flags & PRIORITY_FLAG:
            if len(payload) < frames.PRIORITY_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS is too short for its priority field")
            payload = payload[frames.PRIORITY_BYTES :]
        if flags & END_HEADERS:
            return stream_id, flags, payload
        self._stream_id, self._flags, self._fragments = stream_id, flags, [payload]
        self._fragment_bytes = len(payload)
        return None

    def add_continuation(self, stream_id: int, flags: int, payload: bytes) -> HeaderBlock | None:
        if not self.is_open or self._stream_id != stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        self._fragments.append(payload)
        self._fragment_bytes += len(payload)
        if len(self._fragments) > MAX_BLOCK_FRAMES or self._fragment_bytes > MAX_BLOCK_BYTES:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"the header block has more than {MAX_BLOCK_BYTES} bytes or {MAX_BLOCK_FRAMES} frames",
            )
        if not flags & END_HEADERS:
            return None
        block = stream_id, self._flags, b"".join(self._fragments)
        self._stream_id, self._fragments = 0, []
        return block

    def decode_request(self, block: bytes) -> ParsedHead:
        return self._cache.get(block) or self._decode_uncached(block)

    def decode_trailers(self, block: bytes) -> Sequence[Field]:
        """Decode trailers, which are not used; but they may change the HPACK table."""
        fields = self._decode(block)
        self._drop_outdated_cache()
        return fields or ()

    def _decode(self, block: bytes) -> list[Field] | None:
        before = self._decoder.decoded_fields
        try:
            fields = self._decoder.decode(block)
        except HpackError as error:
            code = ErrorCode.ENHANCE_YOUR_CALM if isinstance(error, HpackBomb) else ErrorCode.COMPRESSION_ERROR
            raise ConnectionFault(code, str(error)) from None
        self._pay(self._decoder.decoded_fields - before, len(block))
        return fields

    def _decode_uncached(self, block: bytes) -> ParsedHead:
        fields = self._decode(block)
        changed_table = self._decoder.table_version != self._table_version
        self._drop_outdated_cache()
        if fields is None:
            return self._parse_head(None), None
        request = parse_request(fields)
        parsed = self._parse_head(request), content_length(request)
        if not changed_table and len(block) <= _CACHED_BLOCK_BYTES:
            if len(self._cache) >= _CACHED_BLOCKS:
                self._cache.clear()
            self._cache[block] = parsed
        return parsed

    def _drop_outdated_cache(self) -> None:
        """Clear the cache when the table has changed: the same bytes then decode to other fields."""
        if self._decoder.table_version != self._table_version:
            self._table_version = self._decoder.table_version
            self._cache.clear()


_FIELD_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_PSEUDO_HEADERS = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = (b":method", b":scheme", b":path")
_HTTP1_ONLY = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_FORBIDDEN_IN_VALUE = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]\Z")


def parse_request(fields: Iterable[Field]) -> dict[bytes, bytes]:
    """Validate request header fields and return them by name. Values of a repeated name are a list (RFC 9110, 5.3).

    A field that must have one value, such as content-length or authorization, is then invalid for its reader;
    to choose one of two values would let a proxy in front choose the other.
    """
    request: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if name[:1] == b":":
            if regular or name not in _PSEUDO_HEADERS or name in request:
                raise _malformed(f"pseudo-header {name[:40]!r} is unknown, repeated or after a regular field")
            _validate_value(name, value)
        else:
            regular = True
            _validate_field(name, value)
            if name in request:
                value = request[name] + b", " + value
        request[name] = value
    if missing := [name.decode() for name in _REQUIRED if not request.get(name)]:
        raise _malformed(f"the request has no {' and no '.join(missing)}")
    host = request.get(b"host")
    if host is not None and host.lower() != request.get(b":authority", host).lower():
        raise _malformed("the fields host and :authority differ")
    return request


def validate_trailers(fields: Iterable[Field]) -> None:
    for name, value in fields:
        _validate_field(name, value)  # rejects pseudo-headers too


def content_length(request: dict[bytes, bytes]) -> int | None:
    value = request.get(b"content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 15:
        raise _malformed(f"content-length {value[:40]!r} is not a number of bytes")
    return int(value)


def _validate_field(name: bytes, value: bytes) -> None:
    if not _FIELD_NAME.fullmatch(name):
        raise _malformed(f"{name[:40]!r} is not a valid field name")
    if name in _HTTP1_ONLY or (name == b"te" and value != b"trailers"):
        raise _malformed(f"field {name.decode()!r} is not allowed in HTTP/2")
    _validate_value(name, value)


def _validate_value(name: bytes, value: bytes) -> None:
    if _FORBIDDEN_IN_VALUE.search(value):
        raise _malformed(f"field {name[:40]!r} has a value with forbidden characters")


def _malformed(text: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, text)
