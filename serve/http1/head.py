"""The head of an HTTP request: how long it may be, what its target is, and how ASGI tells it."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

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


def scope_of(base: Mapping[str, Any], parser: Any, url: bytes, headers: Pairs) -> tuple[dict[str, Any], bool]:
    """`base` is what all requests of the connection have in common. And whether it goes on after this one."""
    path, query = target(url)
    text = path.decode("latin-1")
    scope = {**base}
    scope["method"] = parser.get_method().decode("latin-1")
    scope["path"] = urllib.parse.unquote(text) if "%" in text else text
    scope["raw_path"], scope["query_string"], scope["headers"] = path, query, headers
    if (version := parser.get_http_version()) != "1.1":
        scope["http_version"] = version
        return scope, False
    return scope, parser.should_keep_alive()


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
