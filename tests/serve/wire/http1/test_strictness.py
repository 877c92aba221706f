"""Requests that RFC 9110 and 9112 forbid: each is refused before the application, and the connection ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.serve.wire.http1.fakes import Application, connect
from tests.serve.wire.transport import FakeTransport

GET, POST = b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nhost: x\r\n"
HOST = b"host: x\r\n"


def answers(sent: bytes) -> tuple[list[int], list[str]]:
    """Return the statuses of the responses to these bytes, and the paths that the application got."""
    transport, paths = exchange(sent)
    return transport.statuses, paths


def exchange(*pieces: bytes) -> tuple[FakeTransport, list[str]]:
    async def run() -> tuple[FakeTransport, list[str]]:
        app, transport = Application(), FakeTransport()
        connection = connect(app, transport)
        for sent in pieces:
            for place in range(0, len(sent), 1000):
                connection.data_received(sent[place : place + 1000])
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        return transport, [request.path for request in app.requests]

    return asyncio.run(run())


def chunked(body: bytes, head: bytes = POST) -> bytes:
    return head + b"transfer-encoding: chunked\r\n\r\n" + body


REFUSED: dict[str, tuple[int, bytes]] = {
    "no host": (400, GET + b"\r\n"),
    "two hosts": (400, GET + HOST + b"host: y\r\n\r\n"),
    "two equal hosts": (400, GET + HOST + HOST + b"\r\n"),
    "two hosts in HTTP/1.0": (400, b"GET / HTTP/1.0\r\n" + HOST + HOST + b"\r\n"),
    "host with a space": (400, GET + b"host: a b\r\n\r\n"),
    "host list": (400, GET + b"host: a, b\r\n\r\n"),
    "host with a path": (400, GET + b"host: a/b\r\n\r\n"),
    "host with a user": (400, GET + b"host: a@b\r\n\r\n"),
    "host with a wrong port": (400, GET + b"host: a:b\r\n\r\n"),
    "host with a wrong address": (400, GET + b"host: [x]\r\n\r\n"),
    "gzip, chunked": (501, POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "gzip and chunked": (501, POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    "gzip": (400, POST + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n"),
    "identity": (400, POST + b"transfer-encoding: identity\r\n\r\n"),
    "chunked, identity": (400, POST + b"transfer-encoding: chunked, identity\r\n\r\n"),
    "chunked twice": (400, POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n"),
    "xchunked": (400, POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n"),
    "chunked with a parameter": (400, POST + b"transfer-encoding: chunked;q=1\r\n\r\n0\r\n\r\n"),
    "empty transfer-encoding": (400, POST + b"transfer-encoding:\r\n\r\n"),
    "chunked in HTTP/1.0": (400, chunked(b"0\r\n\r\n", b"POST / HTTP/1.0\r\n")),
    "length and coding": (400, POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
    "coding and length": (400, POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n"),
    "two lengths": (400, POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef"),
    "a list of lengths": (400, POST + b"content-length: 5, 6\r\n\r\nabcdef"),
    "negative length": (400, POST + b"content-length: -1\r\n\r\n"),
    "signed length": (400, POST + b"content-length: +1\r\n\r\na"),
    "hexadecimal length": (400, POST + b"content-length: 0x1\r\n\r\na"),
    "empty length": (400, POST + b"content-length:\r\n\r\n"),
    "endless length": (400, POST + b"content-length: 99999999999999999999\r\n\r\n"),
    "no version": (400, b"GET /\r\n\r\n"),
    "HTTP/0.9": (400, b"GET / HTTP/0.9\r\n\r\n"),
    "HTTP/2.0": (505, b"GET / HTTP/2.0\r\nhost: x\r\n\r\n"),
    "HTTP/2 with prior knowledge": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/1.2": (505, b"GET / HTTP/1.2\r\nhost: x\r\n\r\n"),
    "HTTP/3.0": (505, b"GET / HTTP/3.0\r\nhost: x\r\n\r\n"),
    "HTTP/11": (400, b"GET / HTTP/11\r\nhost: x\r\n\r\n"),
    "http/1.1": (400, b"GET / http/1.1\r\nhost: x\r\n\r\n"),
    "two spaces behind the method": (400, b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "three spaces behind the method": (400, b"GET   / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "two spaces behind the URL": (400, b"GET /  HTTP/1.1\r\nhost: x\r\n\r\n"),
    "space behind the version": (400, b"GET / HTTP/1.1 \r\nhost: x\r\n\r\n"),
    "another scheme": (400, b"GET ftp://a/b HTTP/1.1\r\nhost: x\r\n\r\n"),
    "URL without a host": (400, b"GET http:///b HTTP/1.1\r\nhost: x\r\n\r\n"),
    "URL with a user": (400, b"GET http://u:p@a/b HTTP/1.1\r\nhost: x\r\n\r\n"),
    "authority": (400, b"GET a:80 HTTP/1.1\r\nhost: x\r\n\r\n"),
    "connect": (501, b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"),
    "star without OPTIONS": (400, b"GET * HTTP/1.1\r\nhost: x\r\n\r\n"),
    "no slash": (400, b"GET foo HTTP/1.1\r\nhost: x\r\n\r\n"),
    "fragment": (400, b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01 this is TLS\r\n\r\n"),
    "control character in the URL": (400, b"GET /\x01 HTTP/1.1\r\nhost: x\r\n\r\n"),
    "no ASCII in the URL": (400, b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n"),
    "folded header": (400, GET + HOST + b"a: b\r\n c\r\n\r\n"),
    "folded first header": (400, GET + b" host: x\r\n\r\n"),
    "CR in a value": (400, GET + HOST + b"a: b\rc\r\n\r\n"),
    "CR for a line": (400, GET + HOST + b"a: b\r\rb: c\r\n\r\n"),
    "LF for a line": (400, GET + HOST[:-2] + b"\n\r\n"),
    "NUL in a value": (400, GET + HOST + b"a: b\0c\r\n\r\n"),
    "NUL in a name": (400, GET + HOST + b"a\0: b\r\n\r\n"),
    "space before the colon": (400, GET + HOST + b"a : b\r\n\r\n"),
    "space in a name": (400, GET + HOST + b"a b: c\r\n\r\n"),
    "no name": (400, GET + HOST + b": b\r\n\r\n"),
    "no colon": (400, GET + HOST + b"ab\r\n\r\n"),
    "unknown method": (400, b"FETCH / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "lower method": (400, b"get / HTTP/1.1\r\nhost: x\r\n\r\n"),
    "too many headers": (431, GET + HOST + b"a: b\r\n" * 128 + b"\r\n"),
    "too many headers without an end": (431, GET + HOST + b"a:\r\n" * 5000),
    "long header": (431, GET + HOST + b"a: " + b"b" * (33 << 10) + b"\r\n\r\n"),
    "header without an end": (431, GET + HOST + b"a: " + b"b" * 200_000),
    "long URL": (414, b"GET /" + b"a" * 8200 + b" HTTP/1.1\r\nhost: x\r\n\r\n"),
    "endless empty lines": (431, b"\r\n" * 20_000),
    "chunk size that is no number": (400, chunked(b"x\r\n")),
    "chunk size with a sign": (400, chunked(b"+1\r\na\r\n0\r\n\r\n")),
    "chunk size with 0x": (400, chunked(b"0x1\r\na\r\n0\r\n\r\n")),
    "chunk size with a space": (400, chunked(b"1 \r\na\r\n0\r\n\r\n")),
    "endless chunk size": (400, chunked(b"fffffffffffffffff\r\na\r\n")),
    "LF behind a chunk size": (400, chunked(b"1\na\r\n0\r\n\r\n")),
    "longer chunk": (400, chunked(b"1\r\nabc\r\n0\r\n\r\n")),
    "NUL in a chunk extension": (400, chunked(b"1;a\0\r\na\r\n0\r\n\r\n")),
    "LF in a chunk extension": (400, chunked(b"1;a\na\r\n0\r\n\r\n")),
    "endless chunk extension": (431, chunked(b"1;a=" + b"b" * 80_000)),
    "endless trailers": (431, chunked(b"0\r\n" + b"a: b\r\n" * 10_000)),
    "trailer without an end": (431, chunked(b"2\r\nhi\r\n0\r\nx: " + b"a" * 600_000)),
    "length in a trailer": (400, chunked(b"0\r\ncontent-length: 5\r\n\r\n")),
    "folded trailer": (400, chunked(b"0\r\na: b\r\n c\r\n\r\n")),
    "gzip with an upgrade": (
        400,
        POST + b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    ),
    "length and coding with an upgrade": (
        400,
        POST + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forbidden_request_is_refused_and_nothing_behind_it_is_read(name: str) -> None:
    status, sent = REFUSED[name]
    transport, _ = exchange(sent + b"\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
    assert transport.statuses == [status]
    assert b'{"error":"' in transport.written
    assert b"\r\nconnection: close\r\n" in transport.written


@pytest.mark.parametrize(
    "before",
    [
        b"",
        b"\r\n",
        GET + HOST + b"a: b  c\r\n\r\n",
        POST + b"content-length: 9\r\n\r\n\r\n{  }GET  ",
        chunked(b"4\r\n  GE\r\n0\r\n\r\n"),
    ],
)
@pytest.mark.parametrize("sent", [b"GET  / HTTP/1.1\r\n", b"GET /  HTTP/1.1\r\n"])
def test_several_blanks_are_refused_wherever_the_bytes_are_cut(before: bytes, sent: bytes) -> None:
    whole = before + sent + HOST + b"\r\n"
    answered = before.count(b"host")
    for cut in range(len(whole)):
        transport, paths = exchange(whole[:cut], whole[cut:])
        assert (transport.statuses, len(paths)) == ([200] * answered + [400], answered), cut


@pytest.mark.parametrize("path", ["/a", "/refused"])
def test_refusal_of_an_upgrade_request_is_sent_despite_later_data(path: str) -> None:
    before = f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
    found, _ = answers(before + REFUSED["gzip with an upgrade"][1] + GET + HOST + b"\r\n")
    assert found[1:] == [400]


@pytest.mark.parametrize("name", REFUSED)
def test_the_request_before_a_forbidden_one_is_answered_first(name: str) -> None:
    status, sent = REFUSED[name]
    found, paths = answers(b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n" + sent)
    assert (found, paths[0]) == ([200, status], "/first")
    assert "/smuggled" not in paths


ACCEPTED: dict[str, bytes] = {
    "empty host": GET + b"host:\r\n\r\n",
    "port": GET + b"host: example.com:8080\r\n\r\n",
    "IPv6": GET + b"host: [::1]:8080\r\n\r\n",
    "URL": b"GET http://a:80/b?c HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTPS URL": b"GET HTTPS://[::1]/b HTTP/1.1\r\nhost: x\r\n\r\n",
    "URL without a path": b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n",
    "star": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "an empty line before it": b"\r\n" + GET + HOST + b"\r\n",
    "extension": chunked(b'3;a=b;c="d"\r\nabc\r\n0\r\n\r\n'),
    "trailer": chunked(b"3\r\nabc\r\n0\r\na: b\r\n\r\n"),
    "capital coding": POST + b"Transfer-Encoding: CHUNKED\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "upgrade": GET + HOST + b"connection: upgrade\r\nupgrade: x\r\n\r\n",
    "upgrade with an empty body": POST + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 0\r\n\r\n",
    "upgrade with a body": POST + b"connection: upgrade\r\nupgrade: x\r\ncontent-length: 3\r\n\r\nabc",
    "upgrade with chunks": POST
    + b"connection: upgrade\r\nupgrade: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    "all headers": GET + HOST + b"a: b\r\n" * 127 + b"\r\n",
    "32 KiB": GET + HOST + b"a: " + b"b" * (31 << 10) + b"\r\n\r\n",
    "8 KiB of URL": b"GET /" + b"a" * 8100 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "tab and high bytes": GET + HOST + b"a: \tb\xff\t\r\n\r\n",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_unusual_request_is_answered_and_the_connection_goes_on(name: str) -> None:
    found, paths = answers(ACCEPTED[name] + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (found, paths[-1]) == ([200, 200], "/next")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nhost: x\r\n\r\n",
        POST + b"connection: close, upgrade\r\nupgrade: x\r\ncontent-length: 3\r\n\r\nabc",
        POST + b"connection: close\r\ncontent-length: 3\r\n\r\nabc",
    ],
)
def test_a_request_that_ends_the_connection_is_the_last(sent: bytes) -> None:
    assert answers(sent + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n") == ([200], ["/"])


@pytest.mark.parametrize("pad", [0, 3000, 40_000, 200_000])
def test_size_of_a_body_does_not_count_for_the_next_head(pad: int) -> None:
    """The head after the body comes in two pieces."""

    async def run() -> Any:
        transport = FakeTransport()
        connection = connect(Application(), transport)
        connection.data_received(POST + b"content-length: %d\r\n\r\n" % pad + b"a" * pad + b"GET /b HT")
        for _ in range(5):
            await asyncio.sleep(0)
        connection.data_received(b"TP/1.1\r\nhost: x\r\n\r\n")
        for _ in range(5):
            await asyncio.sleep(0)
        return transport.statuses

    assert asyncio.run(run()) == [200, 200]


def test_a_thousand_requests_to_upgrade_are_answered() -> None:
    upgrade = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"

    async def run() -> Any:
        app, transport = Application(), FakeTransport()
        connect(app, transport).data_received(upgrade * 1000)
        while len(app.requests) < 1000 or transport.statuses.count(200) < 1000:
            await asyncio.sleep(0)
        return transport

    assert asyncio.run(run()).statuses == [200] * 1000
