"""Compressed bodies: what `content-encoding` names, undone piece by piece, so that a bomb is refused as it swells."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from pipeline.spec.errors import InvalidPayload
from serve.refusal import Unreadable

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
