"""The body of an HTTP request: read whole, decompressed, within its limits, and parsed if it is JSON.

It is refused as soon as it is too large. `content-encoding` is undone piece by piece, so that a decompression bomb is
refused while it grows.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import msgspec

from pipeline.system.errors import InvalidPayload
from serve.errors import TooLarge, UnsupportedMediaType
from serve.limits import MAX_INFLATION, SLICE_BYTES, SMALL_BYTES, BodyLimits, BodyPrice, Budget
from serve.request_context import HttpRequest

ACCEPTED_ENCODINGS = "gzip, deflate"
_UNCOUNTED_BYTES = 4 << 10  # of a body that arrived in one piece
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS  # as zlib names the formats


async def read_body(request: HttpRequest, limits: BodyLimits, budget: Budget, json_bytes: float = math.inf) -> bytes:
    """Return the decompressed body; only its first `json_bytes` are JSON."""
    headers, limit = request.headers, limits.size
    if request.length > limit:
        raise _too_large(limit)
    encoding = headers.get(b"content-encoding")
    name = "" if encoding is None else encoding_name(encoding)
    if name or request.length > SMALL_BYTES or b"transfer-encoding" in headers:
        budget.check_address(request)
    body, more = await request.receive()
    if name or more:
        price = BodyPrice(request, limits, budget, json_bytes)
        inflater = Inflater(name, limits) if name else None
        parts = []
        async for piece in _pieces(request, body, more, limit):
            if inflater is None:
                price.add(piece)
                parts.append(piece)
                continue
            async for part in inflater.feed_in_turns(piece, budget):
                price.add(part, inflater.fed)
                parts.append(part)
        if inflater is not None:
            inflater.end()
        body = b"".join(parts)
    elif len(body) > limit:
        raise _too_large(limit, more=False)
    elif len(body) > _UNCOUNTED_BYTES:
        BodyPrice(request, limits, budget, json_bytes).add(body)
    request.size = len(body)
    return body


async def _pieces(request: HttpRequest, piece: bytes, more: bool, limit: int) -> AsyncIterator[bytes]:
    """Yield the body as it is sent, from this piece on."""
    size = 0
    while True:
        size += len(piece)
        if size > limit:
            raise _too_large(limit, more=more)
        yield piece
        if not more:
            return
        piece, more = await request.receive()


def _too_large(limit: int, *, more: bool = True, prefix: str = "body:") -> TooLarge:
    """`more`: some of the body is, or may be, still to come."""
    error = TooLarge(f"{prefix} larger than the limit of {limit} bytes")
    error.more = more
    return error


class Inflater:
    """Undoes one content encoding; what it yields is never larger than `SLICE_BYTES`, whatever it is fed.

    The body is one stream. gzip allows several behind one another, but 2 MB hold a hundred thousand empty ones.
    """

    def __init__(self, encoding: str, limits: BodyLimits) -> None:
        self._encoding, self._limits = encoding, limits
        self._stream: Any = zlib.decompressobj(_GZIP) if encoding == "gzip" else None
        self.fed = self.made = 0  # bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        if data and self._stream is None:  # `deflate` is a zlib stream by the standard, and a raw one by many clients
            self._stream = zlib.decompressobj(_ZLIB if data[0] & 0x0F == 8 and data[0] >> 4 < 8 else _RAW)
        for place in range(0, len(data), SLICE_BYTES):  # as zlib copies what it leaves
            piece, part = data[place : place + SLICE_BYTES], b""
            self.fed += len(piece)
            while piece or len(part) == SLICE_BYTES:  # zlib may have more than a full part
                part = self._decompress(piece)
                self.made += len(part)
                if self.made > self._limits.size:
                    raise _too_large(self._limits.size, prefix="body: decompressed it is")
                if self.made > max(self._limits.inflated, MAX_INFLATION * self.fed):
                    text = f"body: decompressed it is more than {MAX_INFLATION} times as large; send it uncompressed"
                    raise TooLarge(text)
                yield part
                piece = self._stream.unconsumed_tail

    async def feed_in_turns(self, data: bytes, budget: Budget) -> AsyncIterator[bytes]:
        """Yield the same; what is more than a little work is done in a thread."""
        parts = self.feed(data)
        part = await budget.parse(len(data), next, parts, None)
        while part is not None:
            yield part
            if len(part) < SLICE_BYTES and len(data) <= SLICE_BYTES:  # this was all
                return
            part = await budget.parse(math.inf, next, parts, None)

    def _decompress(self, piece: bytes) -> bytes:
        try:
            part: bytes = self._stream.decompress(piece, SLICE_BYTES)
        except zlib.error as error:
            raise InvalidPayload(f"body: is not valid {self._encoding}: {error}") from None
        if self._stream.unused_data:
            raise InvalidPayload(f"body: goes on behind the end of its {self._encoding} data; send one stream")
        return part

    def end(self) -> None:
        """Raise InvalidPayload if the compressed data does not end where the body does."""
        if self.fed and not self._stream.eof:
            raise InvalidPayload(f"body: ends in the middle of its {self._encoding} data")


def encoding_name(header: bytes) -> str:
    """Return the one encoding that a header names, or an empty string for none."""
    name = header.decode("latin-1").strip().lower().removeprefix("x-")
    if name in ("", "identity"):
        return ""
    if name in ("gzip", "deflate"):
        return name
    given = "more than one coding" if "," in name else repr(name[:40])
    accepted = (b"accept-encoding", ACCEPTED_ENCODINGS.encode())
    text = f"content-encoding: {given} is not supported; send one of {ACCEPTED_ENCODINGS}, or none"
    raise UnsupportedMediaType(text, accepted)


T = TypeVar("T")


def decode_json(
    decoder: msgspec.json.Decoder[T],
    body: bytes | memoryview,
    count_names: Callable[..., int] = lambda _: 0,
    *args: Any,
) -> T:
    """Return what a body holds, which `count_names` gets with `args`; an error names the field where one is wrong.

    A name that an object has twice is refused: parsers take the first or the last.
    """
    try:
        value = decoder.decode(body)
        text = bytes(body)  # no copy of what is bytes already
        colons = text.count(b":")
        may_repeat = colons > 1 and colons != (count := count_names(value, *args))
        if may_repeat and (text.count(b'":') != count or _SPACE_BEFORE_COLON.search(text)):  # in no string
            _NAMES_DECODER.decode(text.decode())
        return value
    except msgspec.ValidationError as error:
        raise InvalidPayload(error_sentence(error)) from None
    except RecursionError:
        raise InvalidPayload("body: lists and objects are nested too deeply") from None
    except ValueError as error:  # msgspec's, and those of UTF-8
        raise InvalidPayload(f"body: not valid JSON: {str(error).removeprefix('JSON is malformed: ')}") from None


def error_sentence(error: msgspec.ValidationError) -> str:
    """Rewrite `Expected `int`, got `str` - at `$.n`` as `n: expected `int`, got `str``."""
    problem, _, path = str(error).removeprefix("Object ").partition(" - at ")
    name = path.strip("`").removeprefix("$").removeprefix(".").partition("[...]")[0] or "body"
    return f"{name}: {problem[:1].lower()}{problem[1:]}"[:200]


def parse_object(body: bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object that a body holds."""
    return decode_json(_OBJECT_DECODER, body, _count_names)


def _count_names(value: Any) -> int:
    """Return how many names a parsed value has; too few where a list begins with a value and objects follow."""
    if type(value) is dict:
        return len(value) + sum([_count_names(part) for part in value.values() if type(part) in (dict, list)])
    if not value or type(value[0]) not in (dict, list):
        return 0
    return sum([_count_names(part) for part in value if part and type(part) in (dict, list)])


def _check_unique(fields: list[tuple[str, Any]]) -> None:
    names = Counter(name for name, _ in fields)
    if len(names) != len(fields):
        [(name, _)] = names.most_common(1)
        raise InvalidPayload(f'body: an object has the name "{name[:80]}" twice')


_OBJECT_DECODER = msgspec.json.Decoder(dict[str, Any])
_SPACE_BEFORE_COLON = re.compile(rb'"\s+:')
_NAMES_DECODER = json.JSONDecoder(object_pairs_hook=_check_unique, parse_int=float)
