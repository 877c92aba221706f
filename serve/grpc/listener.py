"""The gRPC port: its connections, their timeouts, and its end without losing a call."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable

from serve.grpc.http2.connection import Connection, Host
from serve.grpc.http2.streams import Application
from serve.http1.limits import make_room, max_grpc_connections
from serve.sockets import stop_accepting

_NOTICE_SECONDS = 0.1  # for the handshakes that are under way: one round trip
_POLL_SECONDS = 0.005
_SWEEP_SECONDS = 1.0
_BACKLOG = 2048
_TLS_HANDSHAKE_SECONDS = 10.0


class GrpcListener:
    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        tls: ssl.SSLContext | None = None,
        count_rejected: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.socket, self._tls = sock, tls
        self.connections: set[Connection] = set()
        self._max_connections = max_grpc_connections()
        self._stopping = False
        self._host = Host(
            app,
            self.connections,
            make_room=lambda: make_room(self.connections, self._max_connections),
            on_error=count_rejected,
            is_stopping=lambda: self._stopping,
        )
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        handshake_timeout = None if self._tls is None else _TLS_HANDSHAKE_SECONDS
        self._server = await loop.create_server(
            self._connection, sock=self.socket, ssl=self._tls, ssl_handshake_timeout=handshake_timeout, backlog=_BACKLOG
        )
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self, grace_seconds: float) -> None:
        """Answer every call that a client made before it learned of the end, within the grace period."""
        assert self._server is not None and self._sweeper is not None
        stop_accepting(self.socket)
        self._stopping = True
        for connection in tuple(self.connections):
            connection.drain()
        await asyncio.sleep(_NOTICE_SECONDS)  # accept what still waits in the kernel's queue
        self._server.close()
        end = time.monotonic() + grace_seconds
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in tuple(self.connections):
            connection.transport.abort()
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper

    def _connection(self) -> Connection:
        return Connection(self._host)

    async def _sweep(self) -> None:
        """Check all connections once a second, which costs less than a timer in each."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for connection in tuple(self.connections):
                connection.check_timeouts(loop.time())
