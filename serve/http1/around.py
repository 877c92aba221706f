"""What stands around the bodies of one connection: how much of it, and upgrades that nobody makes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from serve.http1.head import MAX_BYTES

_GET, _CONNECT = b"GET / HTTP/1.1\r\n", b"CONNECT"


class Around:
    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.again = False  # the parser is told the end of a head for the second time, and nobody is to know
        self._framing = b""  # how the body of the last request is told from what follows it, where it asks to upgrade
        self._useful = False  # in what was read last there was an end of a head, or some of a body
        self._useless_bytes = 0  # since then

    def head(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """One came to its end."""
        self._useful = True
        if self._parser.should_upgrade() and self._parser.get_method() != _CONNECT:
            framing = (b"content-length", b"transfer-encoding")
            self._framing = b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] in framing])

    def body(self) -> None:
        self._useful = True

    @property
    def upgrading(self) -> bool:
        """The parser takes the request for whole, and is wrong: its body is still to come."""
        return bool(self._framing)

    def resume(self) -> None:
        """The parser passes over the body of a request that asks for another protocol; here it is told of it again."""
        if self._framing:
            framing, self._framing = self._framing, b""
            self.again = True
            self._parser.feed_data(_GET + framing + b"\r\n")
            self.again = False

    def why_too_long(self, size: int) -> tuple[HTTPStatus, str] | None:
        """After `size` bytes more that did not end a request: trailers and the like may not go on for ever."""
        self._useless_bytes = 0 if self._useful else self._useless_bytes + size
        self._useful = False
        if self._useless_bytes <= MAX_BYTES:
            return None
        what = f"around the pieces of the body, or behind them, stand more than {MAX_BYTES} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what
