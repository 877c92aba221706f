"""Clients that only take up room: they are reported, or ended, and no other client is disturbed."""

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
WAIT_SECONDS = 0.15  # longer than a client that ended its side is left without a sign
LEFT: list[bool] = []  # of each request, when it was answered
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
    """What is answered to one that sends this and no more, but listens on."""

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
def test_one_that_ends_in_the_middle_of_its_request_is_reported(sent: bytes) -> None:
    answer = half_closed(sent)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":"the connection was closed for sending in the middle of a request"}' in answer


def test_one_that_has_requested_and_only_listens_is_answered() -> None:
    answer = half_closed(HEAD + b"abc" + HEAD + b"abc")
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert answer.endswith(b"\r\n\r\n3")


def test_one_that_ended_inside_its_second_request_is_answered_the_first() -> None:
    answer = half_closed(HEAD + b"abc" + HEAD + b"a")
    assert answer.index(b"HTTP/1.1 200") < answer.index(b"HTTP/1.1 400")


@pytest.mark.parametrize("version", [b"", b" HTTP/1.0", b" HTTP/1.1\r\nhost: x\r\nconnection: close"])
def test_one_whose_body_goes_wrong_is_reported_also_where_the_connection_ends_with_it(version: bytes) -> None:
    answer = half_closed(b"POST /a" + version + b"\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"\r\n\r\n") == 1


def test_one_that_only_listens_is_waited_for_and_answered() -> None:
    answer = half_closed(b"GET /waits HTTP/1.1\r\nhost: x\r\n\r\n")
    assert LEFT[-1] is False
    sign, _, found = answer.partition(b"\r\n\r\n")
    assert sign == b"HTTP/1.1 100 Continue", "what a client that is gone would have answered with a reset"
    assert found.startswith(b"HTTP/1.1 200 OK\r\n")
    assert found.endswith(b"\r\n\r\n0")


def test_one_of_http_1_0_that_only_listens_gets_its_answer_and_nothing_before() -> None:
    answer = half_closed(b"GET /waits HTTP/1.0\r\n\r\n")
    assert LEFT[-1] is False
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("reset", [False, True])
def test_one_that_closed_its_connection_is_known_to_be_gone(reset: bool) -> None:
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


def test_one_that_states_nothing_at_all_and_ends_is_no_matter() -> None:
    assert half_closed(b"") == b""


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_one_that_does_not_take_its_answer_is_cut_off(close: bytes) -> None:
    async def what(listener: Http1Listener, connect: Any) -> None:
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n" + close + b"\r\n")
        while not any(one.transport.get_write_buffer_size() for one in listener.connections):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the kernel has taken all it takes
        sweep(listener, 0)
        sweep(listener, limits.WRITE_TIMEOUT_SECONDS - 1)
        await asyncio.sleep(0)
        assert len(listener.connections) == 1
        sweep(listener, limits.WRITE_TIMEOUT_SECONDS + 1)
        while listener.connections:
            await asyncio.sleep(0.001)
        writer.transport.abort()

    talk(what)


def test_one_that_takes_its_answer_slowly_has_its_time() -> None:
    async def what(listener: Http1Listener, connect: Any) -> int:
        reader, writer = await connect()
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        taken = 0
        while chunk := await reader.read(1 << 20):
            taken += len(chunk)
            if taken < LARGE // 2:
                await asyncio.sleep(0.002)
                sweep(listener, taken / LARGE * 100)  # far more than a stuck one has
        writer.close()
        return taken

    assert talk(what) > LARGE


def test_the_one_silent_for_longest_gives_way_to_a_new_one() -> None:
    async def what(listener: Http1Listener, connect: Any) -> list[bytes]:
        clients = []
        for _ in range(3):
            clients.append(await connect())
            await asyncio.sleep(0.01)
        clients[1][1].write(b"GET / HTT")  # this one has begun, and is given up sooner than the idle ones
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


def test_where_all_are_being_served_a_new_one_is_reported() -> None:
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


def test_the_service_requests_as_many_files_as_it_may_have_and_keeps_some() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        most, of_grpc = limits.max_http_connections(), limits.max_grpc_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == resource.RLIM_INFINITY or most + of_grpc < soft
        assert soft in (hard, resource.RLIM_INFINITY) or most == 16 << 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
