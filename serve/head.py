"""The head of an HTTP request: how long it may be, and what its target is."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import httptools

MAX_BYTES = 32 << 10
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128

Pairs = Sequence[tuple[bytes, bytes]]


def why_too_long(url: bytes, headers: Pairs, most: int) -> tuple[HTTPStatus, str] | None:
    """`most` bytes were read of it, which spares counting those of a head that is short."""
    if len(url) > MAX_URL_BYTES:
        return HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL is longer than {MAX_URL_BYTES} bytes"
    if len(headers) > MAX_HEADERS or (
        most > MAX_BYTES and sum(len(name) + len(value) for name, value in headers) > MAX_BYTES
    ):
        what = f"the head has more than {MAX_HEADERS} headers, or {MAX_BYTES} bytes of them"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what
    return None


def why_too_long_already(size: int) -> tuple[HTTPStatus, str] | None:
    """A head that is not whole yet is held in memory, so it is bounded before it is."""
    if size <= MAX_BYTES + MAX_URL_BYTES:
        return None
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is longer than {MAX_BYTES} bytes"


def target(url: bytes) -> tuple[bytes, bytes]:
    """The path and the query."""
    if url.startswith(b"/"):
        path, _, query = url.partition(b"?")
        return path, query
    try:  # of a client that takes us for a proxy
        found = httptools.parse_url(url)
    except httptools.HttpParserError:
        return url, b""
    return found.path or b"/", found.query or b""
