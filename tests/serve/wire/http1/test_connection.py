"""The service's own HTTP/1.1 protocol over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve.monitoring.logs import ConnectionLog
from serve.wire import connection_limits as limits
from serve.wire.http1 import Request
from serve.wire.listeners import Http1Listener
from serve.wire.request import Disconnected

Exchange = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]
LOST = asyncio.TimeoutError


class Echo:
    """Answers with the method, the path and the body; remembers the requests."""

    request_class = Request

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.arrived = asyncio.Event()
        self.go_on = asyncio.Event()
        self.saw_gone = asyncio.Event()

    def begin(self, request: Request) -> Any:
        self.requests.append(request)
        if request.path == "/refused":
            request.respond_now(503, (), b"busy")
            return None
        if request.path == "/fails-at-once":
            raise ValueError("a secret")
        return self.answer(request)

    async def answer(self, request: Request) -> None:
        path = request.path
        if path == "/fails":
            raise ValueError("a secret")
        if path == "/early":
            await request.respond(200, (), b"no")
            return
        if path == "/streams":
            request.start_stream(200, ())
            for part in (b"one", b"", b"two"):
                await request.send_part(part)
            request.end_stream()
            return
        body, more = b"", True
        while more:
            try:
                piece, more = await request.receive()
            except Disconnected:
                self.saw_gone.set()
                return
            body += piece
        if path == "/waits":
            self.arrived.set()
            await self.go_on.wait()
            if request.is_disconnected():
                self.saw_gone.set()
        headers = [(b"x-bad", b"a\r\nx-evil: b")] if path == "/split" else []
        await request.respond(200, headers, b"%b %b %d" % (request.method.encode(), path.encode(), len(body)))


def talk(what: Callable[[Echo, Http1Listener, Callable[[], Any]], Awaitable[Any]]) -> Any:
    """Run a listener with the application above, and a client against it."""

    async def run() -> Any:
        app = Echo()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            listener = Http1Listener(app, sock, [("x-served-by", "me")], ConnectionLog())
            await listener.start()
            place = sock.getsockname()
            try:
                async with asyncio.timeout(10):
                    return await what(app, listener, lambda: asyncio.open_connection(*place))
            finally:
                await listener.stop(5)

    return asyncio.run(run())


def ask(*pieces: bytes) -> bytes:
    """Send the pieces one after the other, and return all bytes until the server closes the connection."""

    async def what(_app: Echo, _listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # so that the server usually gets each piece by itself
        answer: bytes = await reader.read()
        writer.close()
        return answer

    found: bytes = talk(what)
    return found


def post(path: str, body: bytes = b"", *headers: str, close: bool = False) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, *(["connection: close"] if close else []), "", ""]).encode() + body


def test_pipelined_requests_are_answered_in_their_order() -> None:
    answer = ask(b"".join([post("/a", b"12"), post("/b", b"3"), post("/c", close=True)]))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert answer.index(b"POST /a 2") < answer.index(b"POST /b 1") < answer.index(b"POST /c 0")
    assert answer.count(b"connection: close") == 1
    assert answer.count(b"x-served-by: me") == 3


def test_a_body_in_many_pieces_arrives_whole() -> None:
    size = 1_500_000
    connection = post("/a", b"x" * size, close=True)
    assert b"POST /a %d" % size in ask(connection[:70], connection[70:300_000], connection[300_000:])


def test_trailers_of_a_chunked_body_are_no_headers() -> None:
    connection = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"

    async def what(app: Echo, _listener: Http1Listener, connect: Any) -> tuple[bytes, Request]:
        reader, writer = await connect()
        writer.write(connection + b"3\r\nabc\r\n2\r\nde\r\n0\r\nx-api-key: stolen\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer, app.requests[0]

    answer, request = talk(what)
    assert b"POST /a 5" in answer
    assert b"x-api-key" not in request.headers


def test_connection_is_kept_if_the_body_was_not_read() -> None:
    answer = ask(post("/early", b"x" * 600_000), post("/b", close=True))
    assert answer.index(b"\r\n\r\nno") < answer.index(b"POST /b 0")


def test_head_gets_no_body_and_http_1_0_is_closed() -> None:
    answer = ask(b"HEAD /a HTTP/1.0\r\nhost: x\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 9\r\n" in answer


def test_immediate_refusals_keep_connection_and_order() -> None:
    large = post("/refused", b"x" * 600_000)
    answer = ask(post("/a") + large + post("/refused") * 2000 + post("/b", close=True))
    assert answer.count(b"HTTP/1.1 503 Service Unavailable\r\n") == 2001
    assert answer.index(b"POST /a 0") < answer.index(b"busy") < answer.index(b"POST /b 0")


def test_refused_request_with_connection_close_is_the_last() -> None:
    answer = ask(post("/refused", b"abc", close=True) + post("/a"))
    assert (answer.count(b"HTTP/1.1"), answer.count(b"connection: close")) == (1, 1)


def test_a_stream_is_chunked_or_ends_with_the_connection() -> None:
    answer = ask(post("/streams") + post("/b", close=True))
    assert b"transfer-encoding: chunked\r\n" in answer
    assert answer.index(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n") < answer.index(b"POST /b 0")
    assert ask(b"GET /streams HTTP/1.0\r\nhost: x\r\n\r\n").endswith(b"connection: close\r\n\r\nonetwo")


def test_request_with_expect_100_continue_is_answered() -> None:
    connection = post("/a", b"abc", "expect: 100-continue", close=True)
    answer = ask(connection[:-3], connection[-3:])
    assert b"POST /a 3" in answer


def test_unknown_upgrade_is_ignored() -> None:
    first = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    answer = ask(first + post("/b", close=True))
    assert answer.index(b"GET /a 0") < answer.index(b"POST /b 0")


def test_absolute_url_is_accepted() -> None:
    assert b"GET /a%20b 0".replace(b"%20", b" ") in ask(
        b"GET http://somewhere:80/a%20b?q=1 HTTP/1.1\r\nhost: somewhere\r\nconnection: close\r\n\r\n"
    )


@pytest.mark.parametrize("path", ["/fails", "/fails-at-once", "/split"])
def test_internal_error_is_an_opaque_500(path: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(post(path))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert b"x-evil" not in answer
    assert "request failed" in caplog.text
    (record,) = (one for one in caplog.records if one.exc_info)
    fields: dict[str, str] = vars(record)["fields"]
    assert fields["path"] == path
    assert f"x-request-id: {fields['request_id']}\r\n" in answer.decode()


def test_disconnect_is_visible_to_the_running_request() -> None:
    async def what(app: Echo, _listener: Http1Listener, connect: Any) -> None:
        _, writer = await connect()
        writer.write(post("/waits"))
        await app.arrived.wait()
        writer.close()
        await writer.wait_closed()
        while not app.requests[0].is_disconnected():
            await asyncio.sleep(0.001)
        app.go_on.set()
        await app.saw_gone.wait()

    talk(what)


def test_disconnect_within_a_body_ends_the_request() -> None:
    async def what(app: Echo, _listener: Http1Listener, connect: Any) -> None:
        _, writer = await connect()
        writer.write(post("/a", b"abcdef")[:-1])
        await writer.drain()
        while not app.requests:
            await asyncio.sleep(0.001)
        writer.close()
        await app.saw_gone.wait()

    talk(what)


def _sweep(listener: Http1Listener, seconds: float) -> None:
    for one in tuple(listener.connections):
        one.check_timeouts(asyncio.get_running_loop().time() + seconds)


@pytest.mark.parametrize(
    ("sent", "seconds", "answered"),
    [
        (b"", 66, b""),  # idle
        (b"POST /a HT", limits.HEAD_TIMEOUT_SECONDS, b"HTTP/1.1 408"),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", limits.BODY_TIMEOUT_SECONDS, b"HTTP/1.1 408"),
    ],
)
def test_inactive_client_times_out(sent: bytes, seconds: float, answered: bytes) -> None:
    async def what(_app: Echo, listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(sent)
        await writer.drain()
        await asyncio.sleep(0.05)  # it has arrived
        _sweep(listener, seconds - 2)
        with pytest.raises(LOST):
            await asyncio.wait_for(reader.read(1), 0.05)
        _sweep(listener, seconds)
        answer: bytes = await reader.read()
        writer.close()
        return answer

    answer = talk(what)
    assert answer.startswith(answered)
    assert bool(answer) == bool(answered)


def test_running_request_does_not_time_out() -> None:
    async def what(app: Echo, listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(post("/waits", close=True))
        await app.arrived.wait()
        _sweep(listener, 1000)
        app.go_on.set()
        answer: bytes = await reader.read()
        writer.close()
        return answer

    assert b"200 OK" in talk(what)


def test_draining_answers_pending_requests_and_closes() -> None:
    async def what(app: Echo, listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(post("/waits") + post("/b"))
        await app.arrived.wait()
        for one in tuple(listener.connections):
            one.drain()
        app.go_on.set()
        answer: bytes = await reader.read()
        writer.close()
        return answer

    answer = talk(what)
    assert answer.index(b"POST /waits 0") < answer.index(b"connection: close") < answer.index(b"POST /b 0")


@pytest.mark.parametrize(
    ("framing", "body"),
    [("content-length: 5", b"hello"), ("transfer-encoding: chunked", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n")],
)
def test_body_of_a_request_with_an_ignored_upgrade_is_read(framing: str, body: bytes) -> None:
    """Java's client requests an upgrade to h2c with its first request."""
    head = f"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n{framing}\r\n\r\n"
    for pieces in ([head.encode() + body], [head.encode(), body], [head.encode(), body[:1], body[1:]]):
        answer = ask(*pieces, post("/b", b"x", close=True))
        assert answer.index(b"POST /a 5") < answer.index(b"POST /b 1")


def test_requests_beyond_the_grace_period_are_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def what(app: Echo, listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(post("/waits"))
        await app.arrived.wait()
        await listener.stop(0.01)
        app.go_on.set()
        answer: bytes = await reader.read()
        writer.close()
        return answer

    assert talk(what) == b""
    (record,) = caplog.records
    assert (record.getMessage(), vars(record)["fields"]) == ("the grace period is over", {"unfinished": 1})
