"""Bytes in, bytes out: what the service's own HTTP protocol does with each, over real sockets."""

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
    """All that comes back until the server closes; the pieces are sent one after the other."""

    async def what(_app: Echo, _listener: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # a piece of its own for the server, most times
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


def test_a_chunked_body_arrives_and_its_trailers_pass_for_no_headers() -> None:
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


def test_an_answer_without_the_body_being_read_keeps_the_connection() -> None:
    answer = ask(post("/early", b"x" * 600_000), post("/b", close=True))
    assert answer.index(b"\r\n\r\nno") < answer.index(b"POST /b 0")


def test_head_gets_no_body_and_http_1_0_is_closed() -> None:
    answer = ask(b"HEAD /a HTTP/1.0\r\nhost: x\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 9\r\n" in answer


def test_requests_refused_at_once_keep_the_connection_and_its_order() -> None:
    large = post("/refused", b"x" * 600_000)
    answer = ask(post("/a") + large + post("/refused") * 2000 + post("/b", close=True))
    assert answer.count(b"HTTP/1.1 503 Service Unavailable\r\n") == 2001
    assert answer.index(b"POST /a 0") < answer.index(b"busy") < answer.index(b"POST /b 0")


def test_a_request_refused_at_once_that_ends_the_connection_is_the_last_one() -> None:
    answer = ask(post("/refused", b"abc", close=True) + post("/a"))
    assert (answer.count(b"HTTP/1.1"), answer.count(b"connection: close")) == (1, 1)


def test_a_stream_is_chunked_or_ends_with_the_connection() -> None:
    answer = ask(post("/streams") + post("/b", close=True))
    assert b"transfer-encoding: chunked\r\n" in answer
    assert answer.index(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n") < answer.index(b"POST /b 0")
    assert ask(b"GET /streams HTTP/1.0\r\nhost: x\r\n\r\n").endswith(b"connection: close\r\n\r\nonetwo")


def test_leave_to_send_is_given_when_the_body_is_wanted() -> None:
    connection = post("/a", b"abc", "expect: 100-continue", close=True)
    answer = ask(connection[:-3], connection[-3:])
    assert b"POST /a 3" in answer


def test_an_upgrade_we_do_not_know_is_answered_as_if_not_requested() -> None:
    first = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    answer = ask(first + post("/b", close=True))
    assert answer.index(b"GET /a 0") < answer.index(b"POST /b 0")


def test_a_url_meant_for_a_proxy_is_read() -> None:
    assert b"GET /a%20b 0".replace(b"%20", b" ") in ask(
        b"GET http://somewhere:80/a%20b?q=1 HTTP/1.1\r\nhost: somewhere\r\nconnection: close\r\n\r\n"
    )


@pytest.mark.parametrize("path", ["/fails", "/fails-at-once", "/split"])
def test_a_fault_of_ours_is_an_opaque_500(path: str, caplog: pytest.LogCaptureFixture) -> None:
    answer = ask(post(path))
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert b"x-evil" not in answer
    assert "request failed" in caplog.text
    (record,) = (one for one in caplog.records if one.exc_info)
    fields: dict[str, str] = vars(record)["fields"]
    assert fields["path"] == path
    assert f"x-request-id: {fields['request_id']}\r\n" in answer.decode()


def test_who_hung_up_is_known_to_be_gone() -> None:
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


def test_who_hangs_up_inside_a_body_ends_the_request() -> None:
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
def test_a_client_that_does_not_go_on_is_given_up(sent: bytes, seconds: float, answered: bytes) -> None:
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


def test_a_request_that_takes_its_time_on_our_side_is_not_given_up() -> None:
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


def test_a_stop_answers_what_was_requested_and_closes() -> None:
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
def test_a_body_behind_an_upgrade_no_one_makes_is_read(framing: str, body: bytes) -> None:
    """Java's client requests h2c with whatever it sends first."""
    head = f"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n{framing}\r\n\r\n"
    for pieces in ([head.encode() + body], [head.encode(), body], [head.encode(), body[:1], body[1:]]):
        answer = ask(*pieces, post("/b", b"x", close=True))
        assert answer.index(b"POST /a 5") < answer.index(b"POST /b 1")


def test_what_takes_longer_than_the_grace_period_is_given_up_and_logged(caplog: pytest.LogCaptureFixture) -> None:
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
