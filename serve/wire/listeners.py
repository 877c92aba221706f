"""The listeners of HTTP/1.1 and HTTP/2: where connections come from, limits, and an end that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Any, Generic, TypeVar

from serve.wire import http1
from serve.wire.accepting import Acceptor, close_listener
from serve.wire.connection_limits import (
    HANDSHAKE_TIMEOUT_SECONDS,
    MAX_CALL_BYTES,
    MEMORY_BYTES,
    BufferLimit,
    CallMemory,
    LimitedConnection,
    PeerLimits,
    make_room,
    max_grpc_connections,
    max_http_connections,
    peer_address,
)
from serve.wire.http2 import connection as http2
from serve.wire.http2.streams import Application as Http2Application
from serve.wire.request import Log

_IDLE_SECONDS = 0.3  # for the next request of a connection that was answered before
_FIRST_REQUEST_SECONDS = 5.0  # for a client that has connected and not sent its whole request head yet
_POLL_SECONDS = 0.005
_HANDSHAKE_SHARE = 8  # one of so many connections may be one whose TLS handshake is not finished
_SWEEP_SECONDS = 1.0
_SWEPT_PER_TURN = 64
_MAX_LEAVING = 64  # HTTP/2 connections that ended and wait a moment for their clients to read why
BACKLOG = 2048


C = TypeVar("C", bound=LimitedConnection)


class Listener(ABC, Generic[C]):
    """A port whose connections come from its own socket, or by `take` from another process, which accepts for it."""

    def __init__(
        self,
        sock: socket.socket | None,
        log: Log,
        tls: ssl.SSLContext | None,
        make_connection: Callable[[], asyncio.Protocol],
        maximum: int,
    ) -> None:
        """`maximum` is that of connections."""
        self.socket, self.log, self.maximum = sock, log, maximum
        self.peers = PeerLimits(maximum)
        self.connections: set[C] = set()
        self.leaving: set[C] = set()  # no longer among them: they wait a moment for their clients to read why
        self.orphans: set[asyncio.Task[None]] = set()  # what answers clients that are gone
        self.is_stopping = False
        most = max(1, maximum // _HANDSHAKE_SHARE)
        self.handshakes = Handshakes(tls, make_connection, self._has_room, most, log)
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self.socket is not None:
            self._acceptor = Acceptor(self.socket, self.take, self.log)
            self._acceptor.start(BACKLOG)
        self._sweeper = asyncio.create_task(self._sweep())

    def take(self, client: socket.socket) -> None:
        """Serve an accepted connection."""
        self.handshakes.begin(client)

    @abstractmethod
    async def stop(self, grace_seconds: float) -> None:
        """Answer what clients sent before they learned of the end, within the grace period, and close."""

    async def _let_no_more_in(self) -> None:
        """Stop accepting; clients that wait in the kernel's queue at this moment are served all the same."""
        self.is_stopping = True
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None and self.socket is not None:
            acceptor.close()
            for client in await close_listener(self.socket):
                self.take(client)
        await self.handshakes.finish(_FIRST_REQUEST_SECONDS)

    async def _end(self, grace_seconds: float) -> None:
        """Wait for the end of all connections, and abort those that take longer."""
        end = time.monotonic() + grace_seconds
        while (self.connections or self.leaving or self.orphans) and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        if unfinished := len(self.connections) + len(self.orphans):
            self.log.failed("the grace period is over", unfinished=unfinished)
        for connection in (*self.connections, *self.leaving):
            connection.transport.abort()
        assert self._sweeper is not None
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper

    def _has_room(self, handshakes: int) -> bool:
        return make_room(self.connections, self.maximum - handshakes)

    async def _sweep(self) -> None:
        """Check all connections once a second, which costs less than a timer in each."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await self._check_timeouts()

    async def _check_timeouts(self) -> None:
        loop = asyncio.get_running_loop()
        for number, connection in enumerate((*self.connections, *self.leaving), 1):
            connection.check_timeouts(loop.time())
            if number % _SWEPT_PER_TURN == 0:
                await asyncio.sleep(0)


class Http1Listener(Listener[http1.Connection]):
    def __init__(
        self,
        app: http1.Application[Any],
        sock: socket.socket | None,
        headers: Iterable[tuple[str, str]],
        log: Log,
        tls: ssl.SSLContext | None = None,
        maximum: int | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """`headers` are sent in every response."""
        maximum = max_http_connections() if maximum is None else maximum
        super().__init__(sock, log, tls, lambda: http1.Connection(self._host), maximum)
        received, unsent = BufferLimit(memory_bytes), BufferLimit(memory_bytes)
        self._host = http1.Host(app, log, maximum, self.peers, received, unsent, self.connections, self.orphans)
        self._headers = "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1")
        self._renew_date()

    async def stop(self, grace_seconds: float) -> None:
        await self._let_no_more_in()
        await self._await_requests()
        for connection in tuple(self.connections):
            connection.drain()
        await self._end(grace_seconds)

    async def _await_requests(self) -> None:
        """Wait for the first request of each new connection, and a moment for the next one of the others."""
        start = time.monotonic()
        while self.connections and time.monotonic() < start + _FIRST_REQUEST_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() > start + _IDLE_SECONDS:
                answered = [connection for connection in self.connections if not connection.awaits_request]
                if len(answered) == len(self.connections):
                    return
                for connection in answered:
                    connection.drain()

    async def _check_timeouts(self) -> None:
        self._renew_date()
        await super()._check_timeouts()

    def _renew_date(self) -> None:
        self._host.common_headers = b"date: %b\r\n%b" % (formatdate(usegmt=True).encode(), self._headers)


class Http2Listener(Listener[http2.Connection]):
    def __init__(
        self,
        app: Http2Application,
        sock: socket.socket | None,
        log: Log,
        tls: ssl.SSLContext | None = None,
        maximum: int | None = None,
        memory_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        maximum = max_grpc_connections() if maximum is None else maximum
        super().__init__(sock, log, tls, lambda: http2.Connection(self._host), maximum)
        memory = CallMemory(memory_bytes, self._free_memory)
        self._host = http2.Host(
            app, log, memory, self._admit, self._leave, self.leaving.discard, lambda: self.is_stopping
        )

    async def stop(self, grace_seconds: float) -> None:
        """GOAWAY ends a connection: clients get it at once, and new ones when they have connected."""
        self.is_stopping = True
        for connection in tuple(self.connections):
            connection.drain()
        await self._let_no_more_in()
        await self._end(grace_seconds)

    def _admit(self, connection: http2.Connection) -> str:
        """Give a connection a place, if need be that of one without progress; return why not, or an empty text."""
        connection.address = address = peer_address(connection.transport.get_extra_info("peername"))
        if not self.peers.admit(address):
            limit = self.peers.maximum
            make_room([other for other in self.connections if other.address == address], limit)
            if not self.peers.admit(address):
                return f"all {limit} connections of one address are in use"
        if not make_room(self.connections, self.maximum):
            self.peers.release(address)
            return f"all {len(self.connections)} connections are in use"
        self.connections.add(connection)
        return ""

    def _leave(self, connection: http2.Connection) -> bool:
        """Free the place of a connection that ends. Return False if it must not wait for its client to read why."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.peers.release(connection.address)
        self.leaving.add(connection)
        return len(self.leaving) <= _MAX_LEAVING

    def _free_memory(self) -> bool:
        """End the connection whose calls have waited for their client the longest."""
        connection = min(self.connections, key=lambda other: other.waiting_since, default=None)
        if connection is None or connection.waiting_since == math.inf:
            return False
        connection.give_way()
        return True


class Handshakes:
    """Turns accepted sockets into connections; TLS handshakes are counted, limited in number and time, and logged.

    asyncio's servers report a connection only after its handshake, so that clients which never finish one would take up
    files and memory unseen. Without TLS there is nothing to wait for.
    """

    def __init__(
        self,
        context: ssl.SSLContext | None,
        make_connection: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        maximum: int,
        log: Log,
    ) -> None:
        """`has_room` gets the number of handshakes and returns whether one more connection is allowed beside them."""
        self._context, self._make_connection = context, make_connection
        self._has_room, self._maximum, self._log = has_room, maximum, log
        self.running: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._peers = PeerLimits(maximum)

    def begin(self, client: socket.socket) -> None:
        """Begin the handshake of an accepted socket, or close it where a limit is reached."""
        if self._context is None:  # nothing to wait for, and a connection refuses in its own words
            self.running[asyncio.create_task(self._connect(client))] = None
            return
        try:
            peer = peer_address(client.getpeername())
        except OSError:  # it is gone
            client.close()
            return
        if not self._peers.admit(peer):
            self._log.refused(
                "tls_handshakes", reason=f"{self._peers.maximum} handshakes from this address are not finished"
            )
            client.close()
            return
        if len(self.running) >= self._maximum:
            next(iter(self.running)).cancel()
        if not self._has_room(len(self.running)):
            self._log.refused("connections", reason="all connections are being served already")
            self._peers.release(peer)
            client.close()
            return
        self.running[asyncio.create_task(self._shake_hands(client, peer))] = None

    async def finish(self, seconds: float) -> None:
        """Wait for the handshakes that have begun, and end those that take longer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*self.running, return_exceptions=True)

    def cancel(self) -> None:
        for handshake in self.running:
            handshake.cancel()

    async def _connect(self, client: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_connection, client)
        except OSError:  # it is gone
            client.close()
        finally:
            self._end()

    async def _shake_hands(self, client: socket.socket, peer: str) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make_connection, client, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS
            )
        except OSError as error:  # ssl.SSLError and timeouts are too
            self._log.refused("tls_handshake", reason=str(error))
        except asyncio.CancelledError:
            self._log.refused("tls_handshake", reason="others wait for room")
            raise
        finally:
            self._peers.release(peer)
            self._end()

    def _end(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        del self.running[task]
