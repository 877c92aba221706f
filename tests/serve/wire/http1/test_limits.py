"""Connection limits: half-closed, idle and slow clients, and maximum counts."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serve.monitoring.logs import ConnectionLog
from serve.wire import connection_limits as limits
from serve.wire.http1 import Request
from serve.wire.listeners import Http1Listener
from serve.wire.request import Disconnected

HEAD = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n"
WAIT_SECONDS = 0.15  # long enough for the 100 Continue that half-closed clients get
LEFT: list[bool] = []  # for each request, whether its client was gone when it was answered
LARGE = 20 << 20  # more than the kernel's buffers take


class Application:
    """Answers with the length of the body; for /large with that many bytes; /waits waits for a while, or until the
    client is gone.
    """

    request_class = Request

    def begin(self, request: Request) -> Any:
        return self.answer(request)

    async def answer(self, request: Request) -> None:
        size, more = 0, True
        while more:
            try:
                piece, more = await request.receive()
            except Disconnected:
                return
            size += len(piece)
        waits = request.path == "/waits"
        end = asyncio.get_running_loop().time() + WAIT_SECONDS
        while waits and not request.is_disconnected() and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.001)
        LEFT.append(request.is_disconnected())
        await request.respond(200, (), b"x" * LARGE if request.path == "/large" else b"%d" % size)


def talk(what: Callable[[Http1Listener, Callable[[], Any]], Awaitable[Any]], most: int = 100) -> Any:
    async def run() -> Any:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            listener = Http1Listener(Application(), sock, [], ConnectionLog(), maximum=most)
            listener.peers.maximum = 1000  # from one address
            await listener.start()
            place = sock.getsockname()
            try:
                async with asyncio.timeout(10):
                    return await what(listener, lambda: asyncio.open_connection(*place))
            finally:
                await listener.stop(5)

    return asyncio.run(run())


def half_closed(sent: bytes) -> bytes:
    """Send bytes, close the sending side only, and return the answer."""

    async def what(_: Http1Listener, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(sent)
        writer.write_eof()
        answer: bytes = await reader.read()
        writer.close()
        return answer

    found: bytes = talk(what)
    return found


def sweep(listener: Http1Listener, seconds: float) -> None:
    for one in tuple(listener.connections):
        one.check_timeouts(asyncio.get_running_loop().time() + seconds)


@pytest.mark.parametrize("sent", [b"P", b"POST /a HTTP/1.1\r\nhost:", HEAD, HEAD + b"ab"])
def test_half_close_within_a_request_is_a_400(sent: bytes) -> None:
    answer = half_closed(sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":"the connection was closed for sending in the middle of a request"}' in answer


def test_half_closed_client_gets_all_its_answers() -> None:
    answer = half_closed(HEAD + b"abc" + HEAD + b"abc")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.endswith(b"\r\n\r\n3")


def test_half_close_within_the_second_request_answers_the_first() -> None:
    answer = half_closed(HEAD + b"abc" + HEAD + b"a")
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 400")


@pytest.mark.parametrize("version", [b"", b" HTTP/1.0", b" HTTP/1.1\r\nhost: x\r\nconnection: close"])
def test_malformed_chunk_gets_one_400_even_on_a_closing_connection(version: bytes) -> None:
    answer = half_closed(b"POST /a" + version + b"\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"\r\n\r\n") == 1


def test_half_closed_client_gets_100_then_its_late_answer() -> None:
    answer = half_closed(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
    assert LEFT[-1] is False
    sign, _, found = answer.partition(b"\r\n\r\n")
    assert sign == b"HTTP/1.1 100 Continue", "a client that had left would have reset the connection on this"
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    assert found.endswith(b"\r\n\r\n0")


def test_half_closed_http_1_0_client_gets_no_100() -> None:
    answer = half_closed(b"GET /waits HTTP/1.0\r\n\r\n")
    assert LEFT[-1] is False
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("reset", [False, True])
def test_closed_connection_disconnects_the_running_request(reset: bool) -> None:
    async def what(listener: Http1Listener, connect: Any) -> None:
        before = len(LEFT)
        _, writer = await connect()
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.write(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
        while not listener.connections:
            await asyncio.sleep(0.001)
        writer.close()
        while len(LEFT) == before:
            await asyncio.sleep(0.001)
        assert LEFT[-1] is True

    talk(what)


def test_half_close_without_a_request_gets_no_answer() -> None:
    assert half_closed(b"") == b""


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_client_that_reads_nothing_is_disconnected(close: bytes) -> None:
    async def what(listener: Http1Listener, connect: Any) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n" + close + b"\r\n")
        while not any(one.transport.get_write_buffer_size() for one in listener.connections):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the kernel's buffers are full
        sweep(listener, 0)
        sweep(listener, limits.WRITE_TIMEOUT_SECONDS - 1)
        await asyncio.sleep(0)
        assert len(listener.connections) == 1
        sweep(listener, limits.WRITE_TIMEOUT_SECONDS + 1)
        while listener.connections:
            await asyncio.sleep(0.001)
        writer.transport.abort()

    talk(what)


def test_client_that_reads_slowly_is_not_disconnected() -> None:
    async def what(listener: Http1Listener, connect: Any) -> int:
        reader, writer = await connect()
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        taken = 0
        while chunk := await reader.read(1 << 20):
            taken += len(chunk)
            if taken < LARGE // 2:
                await asyncio.sleep(0.002)
                sweep(listener, taken / LARGE * 100)  # far beyond the timeout for a client that reads nothing
        writer.close()
        return taken

    assert talk(what) > LARGE


def test_incomplete_request_is_evicted_before_idle_connections() -> None:
    async def what(listener: Http1Listener, connect: Any) -> list[bytes]:
        clients = []
        for _ in range(3):
            clients.append(await connect())
            await asyncio.sleep(0.01)
        clients[1][1].write(b"GET / HTT")  # an incomplete request
        await asyncio.sleep(0.02)
        reader, writer = await connect()
        writer.write(HEAD + b"abc")
        answers = [await reader.readuntil(b"\r\n\r\n3"), await clients[1][0].read()]
        clients[2][1].write(HEAD + b"abc")
        answers.append(await clients[2][0].readuntil(b"\r\n\r\n3"))
        for _, one in (*clients, (reader, writer)):
            one.close()
        return answers

    new, begun, kept = talk(what, most=3)
    assert new.startswith(b"HTTP/1.1 200")
    assert begun.startswith(b"HTTP/1.1 408")
    assert kept.startswith(b"HTTP/1.1 200")


def test_new_connection_is_refused_if_all_others_are_in_use() -> None:
    async def what(listener: Http1Listener, connect: Any) -> bytes:
        served = [await connect() for _ in range(2)]
        for _, writer in served:
            writer.write(HEAD)  # and its body is awaited
        while sum(one.current is not None for one in listener.connections) < 2:
            await asyncio.sleep(0.001)
        reader, late = await connect()
        answer: bytes = await reader.read()
        for one, writer in served:
            writer.write(b"abc")
            await one.readuntil(b"\r\n\r\n3")
            writer.close()
        late.close()
        return answer

    answer = talk(what, most=2)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"2 connections are being served already"}' in answer


@pytest.mark.parametrize("files", [64, 256, 1024])
def test_connections_leave_other_files_to_a_process_with_few(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    most = limits.max_http_connections() + limits.max_grpc_connections()
    assert 16 <= most <= files - min(files // 2, 128)


def test_connection_limits_follow_the_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        most, of_grpc = limits.max_http_connections(), limits.max_grpc_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == resource.RLIM_INFINITY or most + of_grpc < soft
        assert soft in (hard, resource.RLIM_INFINITY) or most == 16 << 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
