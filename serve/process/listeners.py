"""The HTTP and the gRPC listener: where connections come from, limits, and an end that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn

from serve.connection_limits import (
    ConnectionLimits,
    PeerLimits,
    divide,
    make_room,
    max_grpc_connections,
    max_http_connections,
    peer_address,
)
from serve.grpc.http2.connection import Connection as Http2Connection
from serve.grpc.http2.connection import Host
from serve.grpc.http2.stream import CallMemory
from serve.grpc.http2.streams import MAX_CALL_BYTES
from serve.grpc.http2.streams import Application as Http2Application
from serve.http1.connection import Application, Connection
from serve.memory import share
from serve.monitoring.logs import refusals
from serve.process.handshakes import Handshakes
from serve.process.sockets import Acceptor, close_listener

_KEEP_ALIVE_SECONDS = 65  # longer than the idle timeout of the proxies in front, as kserve's is
_IDLE_SECONDS = 0.3  # for the next request of a connection that was answered before
_FIRST_REQUEST_SECONDS = 5.0  # for a client that has connected and not sent its whole request head yet
_POLL_SECONDS = 0.005
_HANDSHAKE_SHARE = 8  # one of so many connections may be one whose TLS handshake is not finished
_DATE_SECONDS = 1.0  # how old the date header may be
BACKLOG = 2048


class Entrance:
    """Where the connections of a listener come from: its own socket, or another process, which accepts them for it."""

    def __init__(
        self,
        sock: socket.socket | None,
        tls: ssl.SSLContext | None,
        make_connection: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        max_connections: int,
        count_rejected: Callable[[str], None],
    ) -> None:
        self._socket = sock
        most = max(1, max_connections // _HANDSHAKE_SHARE)
        self.handshakes = Handshakes(tls, make_connection, has_room, most, count_rejected)
        self._acceptor: Acceptor | None = None

    def open(self) -> None:
        if self._socket is not None:
            self._acceptor = Acceptor(self._socket, self.handshakes.begin, self.handshakes.reject)
            self._acceptor.start(BACKLOG)

    async def close(self) -> None:
        """Let no more in; clients that wait in the kernel's queue at this moment are served all the same."""
        own, self._socket = self._socket, None
        if own is not None:
            if self._acceptor is not None:
                self._acceptor.close()
            for client in await close_listener(own):
                self.handshakes.begin(client)
        await self.handshakes.finish(_FIRST_REQUEST_SECONDS)


class Listener(uvicorn.Server):
    """The HTTP listener, on uvicorn's server."""

    def __init__(
        self,
        app: Application,
        sock: socket.socket | None,
        headers: Sequence[tuple[str, str]],
        grace_seconds: int,
        tls: ssl.SSLContext | None = None,
        count_rejected: Callable[[str], None] = lambda _: None,
        workers: int = 1,
    ) -> None:
        """Without a socket it gets its connections by `take`; `workers` processes divide the limits."""
        self.limits = ConnectionLimits.divided(workers)
        connection = functools.partial(Connection, app=app, limits=self.limits, count_rejected=count_rejected)
        super().__init__(
            uvicorn.Config(
                cast("Any", app),
                interface="asgi3",  # keeps uvicorn from wrapping the application, which is no ASGI one
                http=cast("Any", connection),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=list(headers),
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=grace_seconds,
                limit_concurrency=divide(max_http_connections(), workers),
            )
        )
        self.socket, self._tls, self._count_rejected = sock, tls, count_rejected
        self.listening, self._stopping = asyncio.Event(), asyncio.Event()

    async def run_until_stopped(self) -> None:
        await self.serve()

    def take(self, client: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        self.entrance.handshakes.begin(client)

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for the end, where uvicorn polls ten times a second."""
        while not self.should_exit:
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATE_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the service, which has several listeners."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  # uvicorn's method
        # uvicorn sets these at its first tick, which the first request may precede.
        self.server_state.default_headers = list(self.config.encoded_headers)
        most = self.config.limit_concurrency or 1
        self.entrance = Entrance(
            self.socket,
            self._tls,
            self._connection,
            lambda handshakes: make_room(self.connections, most - handshakes),
            most,
            self._count_rejected,
        )
        self.entrance.open()
        self.servers, self.started = [], True
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Check all connections once a second, which costs less than a timer in each."""
        now = asyncio.get_running_loop().time()
        for connection in tuple(self.connections):
            connection.sweep(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give connections that have not sent their request yet time to, where uvicorn closes them at once."""
        await self.entrance.close()
        await self._await_requests()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)

    async def _await_requests(self) -> None:
        """Wait for the first request of each new connection, and a moment for the next one of the others."""
        start = time.monotonic()
        while self.server_state.connections and time.monotonic() < start + _FIRST_REQUEST_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() > start + _IDLE_SECONDS:
                answered = [connection for connection in self.connections if not connection.awaits_request]
                if len(answered) == len(self.connections):
                    return
                for connection in answered:
                    connection.shutdown()

    @property
    def connections(self) -> set[Connection]:
        return cast("set[Connection]", self.server_state.connections)

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return cast("asyncio.Protocol", make(self.config, self.server_state, {}))


_SWEEP_SECONDS = 1.0
_SWEPT_PER_TURN = 64
_LEAST_CALL_BYTES = 16 << 20  # of memory for calls in one of many processes
_MAX_LEAVING = 64  # connections that ended and wait a moment for their clients to read why


class GrpcListener:
    def __init__(
        self,
        app: Http2Application,
        sock: socket.socket | None,
        tls: ssl.SSLContext | None = None,
        count_rejected: Callable[[str], None] = lambda _: None,
        workers: int = 1,
    ) -> None:
        """Without a socket it gets its connections by `take`; `workers` processes divide the limits."""
        self.socket = sock
        self.connections: set[Http2Connection] = set()
        self._leaving: set[Http2Connection] = set()
        self._max_connections = divide(max_grpc_connections(), workers)
        # Half of them, so that a gateway has room for all its clients, and no address can shut out the others.
        self.peers = PeerLimits((self._max_connections + 1) // 2)
        self._stopping = False
        self._host = Host(
            app,
            CallMemory(share(0.14, workers, _LEAST_CALL_BYTES, MAX_CALL_BYTES), self._free_memory),
            self._admit,
            self._leave,
            self._forget,
            on_error=count_rejected,
            may_log=refusals.allows,
            is_stopping=lambda: self._stopping,
        )
        self.entrance = Entrance(
            sock,
            tls,
            lambda: Http2Connection(self._host),
            lambda handshakes: make_room(self.connections, self._max_connections - handshakes),
            self._max_connections,
            count_rejected,
        )
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.entrance.open()
        self._sweeper = asyncio.create_task(self._sweep())

    def take(self, client: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        self.entrance.handshakes.begin(client)

    async def stop(self, grace_seconds: float) -> None:
        """Answer every call that a client made before it learned of the end, within the grace period."""
        assert self._sweeper is not None
        self._stopping = True
        for connection in tuple(self.connections):
            connection.drain()
        await self.entrance.close()
        end = time.monotonic() + grace_seconds
        while (self.connections or self._leaving) and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in (*self.connections, *self._leaving):
            connection.transport.abort()
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper

    def _admit(self, connection: Http2Connection) -> str:
        """Give a connection a place, if need be that of one without progress; return why not, or an empty text."""
        connection.address = address = peer_address(connection.transport.get_extra_info("peername"))
        if not self.peers.admit(address):
            limit = self.peers.maximum
            make_room([other for other in self.connections if other.address == address], limit)
            if not self.peers.admit(address):
                return f"all {limit} connections of one address are in use"
        if not make_room(self.connections, self._max_connections):
            self.peers.release(address)
            return f"all {len(self.connections)} connections are in use"
        self.connections.add(connection)
        return ""

    def _leave(self, connection: Http2Connection) -> bool:
        """Free the place of a connection that ends. Return False if it must not wait for its client to read why."""
        if connection in self.connections:
            self.connections.discard(connection)
            self.peers.release(connection.address)
        self._leaving.add(connection)
        return len(self._leaving) <= _MAX_LEAVING

    def _forget(self, connection: Http2Connection) -> None:
        self._leaving.discard(connection)

    def _free_memory(self) -> bool:
        """End the connection whose calls have waited for their client the longest."""
        connection = min(self.connections, key=lambda other: other.waiting_since, default=None)
        if connection is None or connection.waiting_since == math.inf:
            return False
        connection.give_way()
        return True

    async def _sweep(self) -> None:
        """Check all connections once a second, which costs less than a timer in each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for number, connection in enumerate((*self.connections, *self._leaving), 1):
                connection.check_timeouts(loop.time())
                if number % _SWEPT_PER_TURN == 0:
                    await asyncio.sleep(0)
