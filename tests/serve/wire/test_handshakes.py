"""Clients that connect to the HTTPS port and do not finish their TLS handshake."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from serve.monitoring import logs
from serve.monitoring.logs import ConnectionLog, LogLimit
from serve.security import CertificatePair, Tls
from serve.wire import accepting, listeners
from serve.wire.connection_limits import HANDSHAKE_TIMEOUT_SECONDS, LOG_LINES_PER_SECOND
from serve.wire.http2 import frames
from serve.wire.listeners import Http1Listener, Http2Listener
from tests.serve import certificates
from tests.serve.wire.http1.fakes import Application
from tests.serve.wire.http2.frames import CLIENT_PREFACE, EchoApplication

REQUEST = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> CertificatePair:
    return certificates.make(tmp_path_factory.mktemp("tls"), "localhost")


class Port:
    """An HTTPS listener in this process."""

    def __init__(self, listener: Http1Listener, pair: CertificatePair, rejected: Counter[str]) -> None:
        self.listener, self.rejected = listener, rejected
        assert listener.socket is not None
        self.address = listener.socket.getsockname()
        self._context = ssl.create_default_context(cafile=str(pair.certificate))

    @property
    def running(self) -> int:
        """Return the number of handshakes that are not finished."""
        return len(self.listener.handshakes.running)

    async def request(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self.address, ssl=self._context, server_hostname="localhost")
        writer.write(REQUEST)
        answer = await reader.read()
        writer.close()
        return answer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)


def talk(pair: CertificatePair, what: Callable[[Port], Awaitable[Any]], most: int = 64) -> Any:
    async def run() -> Any:
        rejected: Counter[str] = Counter()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            context = Tls(pair).context
            log = ConnectionLog(lambda label: rejected.update([label]))
            listener = Http1Listener(Application(), sock, [], log, context, maximum=most)
            listener.peers.maximum = 1000  # from one address
            await listener.start()
            try:
                async with asyncio.timeout(30):
                    return await what(Port(listener, pair, rejected))
            finally:
                await listener.stop(5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def test_unfinished_handshake_times_out_and_is_counted(pair: CertificatePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_TIMEOUT_SECONDS", 0.05)

    async def what(port: Port) -> None:
        reader, writer = await port.connect()
        assert await reader.read() == b"", "closed without a response"
        await port.wait_until(lambda: port.rejected["tls_handshake"] == 1)
        assert not port.running
        writer.close()
        assert (await port.request()).startswith(b"HTTP/1.1 200 ")

    talk(pair, what)


def test_handshake_timeout_is_short() -> None:
    assert HANDSHAKE_TIMEOUT_SECONDS <= 10


def test_unfinished_handshakes_of_one_address_are_limited(pair: CertificatePair) -> None:
    async def what(port: Port) -> None:
        writers = [(await port.connect())[1] for _ in range(200)]
        await port.wait_until(lambda: port.rejected["tls_handshakes"] == 200 - 4)
        assert port.running == 4, "half of an eighth of 64 connections"
        for writer in writers:
            writer.close()
        await port.wait_until(lambda: not port.running)
        assert (await port.request()).startswith(b"HTTP/1.1 200 ")

    talk(pair, what)


def test_the_grpc_port_has_the_same_limits(pair: CertificatePair) -> None:
    rejected: Counter[str] = Counter()

    async def run() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            tls = Tls(pair).grpc_context
            log = ConnectionLog(lambda label: rejected.update([label]))
            listener = Http2Listener(EchoApplication(), sock, log, tls, maximum=64)
            await listener.start()
            writers = [(await asyncio.open_connection(*sock.getsockname()))[1] for _ in range(200)]
            while rejected["tls_handshakes"] < 200 - 4:
                await asyncio.sleep(0.001)
            assert len(listener.handshakes.running) == 4
            for writer in writers:
                writer.close()
            while listener.handshakes.running:
                await asyncio.sleep(0.001)
            context = ssl.create_default_context(cafile=str(pair.certificate))
            context.set_alpn_protocols(["h2"])
            reader, writer = await asyncio.open_connection(
                *sock.getsockname(), ssl=context, server_hostname="localhost"
            )
            writer.write(CLIENT_PREFACE)
            assert (await reader.readexactly(9))[3] == frames.SETTINGS
            writer.close()
            await listener.stop(5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 30))


def test_unfinished_handshake_is_evicted_by_a_new_one(pair: CertificatePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses differ, so that no limit of a single one applies."""
    numbers = iter(range(10_000))
    monkeypatch.setattr(listeners, "peer_address", lambda _: str(next(numbers)))

    async def what(port: Port) -> None:
        writers = [(await port.connect())[1] for _ in range(100)]
        await port.wait_until(lambda: port.rejected["tls_handshake"] >= 100 - 8)
        assert (await port.request()).startswith(b"HTTP/1.1 200 ")
        for writer in writers:
            writer.close()

    talk(pair, what)


def test_accepting_pauses_while_the_process_may_open_no_more_files(
    pair: CertificatePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_NO_FILES_SECONDS", 0.01)

    class Exhausted:
        """A listening socket that fails once."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock, self.fileno = sock, sock.fileno
            self.failures = 0

        def accept(self) -> Any:
            if not self.failures:
                self.failures = 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self._sock.accept()

    async def what(port: Port) -> None:
        sock = port.listener.socket
        assert sock is not None
        monkeypatch.setattr(port.listener._acceptor, "_socket", Exhausted(sock))
        assert (await port.request()).startswith(b"HTTP/1.1 200 ")
        assert port.rejected == {"no_files": 1}

    talk(pair, what)


def test_failed_handshakes_are_logged_at_the_bounded_rate(
    pair: CertificatePair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serve.monitoring.logs.time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(logs, "refusals", LogLimit("more"))
    caplog.set_level(logging.INFO)

    async def what(port: Port) -> None:
        for _ in range(2 * LOG_LINES_PER_SECOND):
            reader, writer = await port.connect()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.read()
            writer.close()
        await port.wait_until(lambda: port.rejected["tls_handshake"] == 2 * LOG_LINES_PER_SECOND)

    talk(pair, what)
    assert sum(record.getMessage() == "refused" for record in caplog.records) == LOG_LINES_PER_SECOND
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
