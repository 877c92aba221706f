"""The service process: HTTP and gRPC listeners, port take-over, drain and end.

`Listener` is an HTTP socket on uvicorn's server, `GrpcListener` the gRPC port; both end without losing a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import uvicorn
import uvloop

from serve.admin import Admin
from serve.app import App
from serve.connection_limits import (
    ConnectionLimits,
    PeerLimits,
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
from serve.grpc.service import Calls
from serve.health import HealthPort
from serve.http1.connection import Application, Connection
from serve.logs import log_fields, log_loop_exception, refusals
from serve.models import LoadedModel, ModelManager, ModelRepository
from serve.options import Options
from serve.request_log import RequestLog
from serve.security import Security, Tls, reload_changed_files
from serve.shadow import Shadow
from serve.snapshot import Metrics
from serve.sockets import Sockets, accept_waiting, stop_accepting, take_over_port
from serve.tls_acceptor import TlsAcceptor
from serve.tracing import Tracer

_KEEP_ALIVE_SECONDS = 65  # longer than the idle timeout of the proxies in front, as kserve's is
_NOTICE_SECONDS = 0.1  # for the handshakes that are under way: one round trip
_IDLE_SECONDS = 0.3  # for the next request of a connection that was answered before
_FIRST_REQUEST_SECONDS = 5.0  # for a client that has connected and not sent its whole request head yet
_POLL_SECONDS = 0.005
_HANDSHAKE_SHARE = 8  # one of so many connections may be one whose TLS handshake is not finished
_DATE_SECONDS = 1.0  # how old the date header may be


async def _close_listening(
    sock: socket.socket,
    servers: Sequence[asyncio.Server],
    connection: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext | None,
) -> None:
    """Close a listening socket; clients that wait in the kernel's queue at this moment are served all the same."""
    waiting = accept_waiting(sock)
    for server in servers:
        server.close()
    loop = asyncio.get_running_loop()
    accepting = [loop.connect_accepted_socket(connection, client, ssl=tls) for client in waiting]
    with contextlib.suppress(TimeoutError):  # of a TLS handshake
        async with asyncio.timeout(_FIRST_REQUEST_SECONDS):
            await asyncio.gather(*accepting, return_exceptions=True)


class Listener(uvicorn.Server):
    def __init__(
        self,
        app: Application,
        sock: socket.socket,
        headers: Sequence[tuple[str, str]],
        grace_seconds: int,
        tls: ssl.SSLContext | None = None,
        count_rejected: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.limits = ConnectionLimits()
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
                limit_concurrency=max_http_connections(),
            )
        )
        self.socket, self._tls, self._count_rejected = sock, tls, count_rejected
        self.listening, self._stopping = asyncio.Event(), asyncio.Event()

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self.socket])

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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn sets these at its first tick, which the first request may precede.
        self.server_state.default_headers = list(self.config.encoded_headers)
        if self._tls is None:
            await super().startup(sockets)
        else:
            most = self.config.limit_concurrency or max_http_connections()
            acceptor = TlsAcceptor(
                self.socket,
                self._tls,
                self._connection,
                lambda handshakes: make_room(self._connections, most - handshakes),
                most // _HANDSHAKE_SHARE,
                self._count_rejected,
            )
            acceptor.start(self.config.backlog)
            self.servers, self.started = [cast("Any", acceptor)], True
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Check all connections once a second, which costs less than a timer in each."""
        now = asyncio.get_running_loop().time()
        for connection in tuple(self._connections):
            connection.sweep(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give connections that have not sent their request yet time to, where uvicorn closes them at once."""
        stop_accepting(self.socket)
        await asyncio.sleep(_NOTICE_SECONDS)
        await _close_listening(self.socket, self.servers, self._connection, self._tls)
        await self._await_requests()
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        elif self._tls is not None:
            for server in self.servers:
                await server.wait_closed()  # of handshakes
        for sock in sockets or ():
            sock.close()

    async def _await_requests(self) -> None:
        """Wait for the first request of each new connection, and a moment for the next one of the others."""
        start = time.monotonic()
        while self.server_state.connections and time.monotonic() < start + _FIRST_REQUEST_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            if time.monotonic() > start + _IDLE_SECONDS:
                connections = self._connections
                answered = [connection for connection in connections if not connection.awaits_request]
                if len(answered) == len(connections):
                    return
                for connection in answered:
                    connection.shutdown()

    @property
    def _connections(self) -> set[Connection]:
        return cast("set[Connection]", self.server_state.connections)

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        return cast("asyncio.Protocol", make(self.config, self.server_state, {}))


_SWEEP_SECONDS = 1.0
_BACKLOG = 2048
_TLS_HANDSHAKE_SECONDS = 10.0
_SWEPT_PER_TURN = 64
_MAX_LEAVING = 64  # connections that ended and wait a moment for their clients to read why


class GrpcListener:
    def __init__(
        self,
        app: Http2Application,
        sock: socket.socket,
        tls: ssl.SSLContext | None = None,
        count_rejected: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.socket, self._tls = sock, tls
        self.connections: set[Http2Connection] = set()
        self._leaving: set[Http2Connection] = set()
        self._max_connections = max_grpc_connections()
        # Half of them, so that a gateway has room for all its clients, and no address can shut out the others.
        self._peers = PeerLimits((self._max_connections + 1) // 2)
        self._stopping = False
        self._host = Host(
            app,
            CallMemory(MAX_CALL_BYTES, self._free_memory),
            self._admit,
            self._leave,
            self._forget,
            on_error=count_rejected,
            may_log=refusals.allows,
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
        await asyncio.sleep(_NOTICE_SECONDS)
        await _close_listening(self.socket, [self._server], self._connection, self._tls)
        end = time.monotonic() + grace_seconds
        while (self.connections or self._leaving) and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)
        for connection in (*self.connections, *self._leaving):
            connection.transport.abort()
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper

    def _connection(self) -> Http2Connection:
        return Http2Connection(self._host)

    def _admit(self, connection: Http2Connection) -> str:
        """Give a connection a place, if need be that of one without progress; return why not, or an empty text."""
        connection.address = address = peer_address(connection.transport.get_extra_info("peername"))
        if not self._peers.admit(address):
            limit = self._peers.maximum
            make_room([other for other in self.connections if other.address == address], limit)
            if not self._peers.admit(address):
                return f"all {limit} connections of one address are in use"
        if not make_room(self.connections, self._max_connections):
            self._peers.release(address)
            return f"all {len(self.connections)} connections are in use"
        self.connections.add(connection)
        return ""

    def _leave(self, connection: Http2Connection) -> bool:
        """Free the place of a connection that ends. Return False if it must not wait for its client to read why."""
        if connection in self.connections:
            self.connections.discard(connection)
            self._peers.release(connection.address)
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


_GRACE_SECONDS = 25  # below the 30 that Kubernetes waits before it kills

log = logging.getLogger(__name__)


class Service:
    """The models, their listeners and the signals that end them; belongs to one event loop."""

    def __init__(
        self,
        loaded: Sequence[LoadedModel],
        shadows: Sequence[Shadow],
        options: Options,
        sockets: Sockets,
        security: Security,
        token: str | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """The sockets are bound already and not listening yet; the token is that of the admin port."""
        self.options, self.sockets, self.security, self._token = options, sockets, security, token
        self._pool = ThreadPoolExecutor(max(4, os.cpu_count() or 1), thread_name_prefix="predict")
        self.repository = ModelRepository()
        self.manager = ModelManager(self.repository, options, self._pool, loaded)
        for shadow in shadows:
            self.manager.set_shadow(shadow)
        self.requests = RequestLog(Metrics(self.repository.loaded_versions), options.log_requests, tracer)
        self._tracer = tracer
        self._app = App(self.repository, self.requests, security.keys, page=options.page)
        self.headers = [("x-served-by", str(os.getpid()))]
        self._public_requested, self._stop_requested = asyncio.Event(), asyncio.Event()
        self._listeners: list[Listener] = []
        self._rpc: GrpcListener | None = None
        self._health: HealthPort | None = None
        self._running: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Serve until a signal ends it."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._handle_signals()
        asyncio.get_running_loop().set_exception_handler(log_loop_exception)
        reloading = asyncio.create_task(reload_changed_files(self.security.reloaded_files()))
        public, standby, admin = self.sockets.public, self.sockets.standby, self.sockets.admin
        if admin is not None and self._token is not None:
            await self._listen(admin, Admin(self.manager, self._token), None)
        if standby is not None:
            await self._listen(standby, self._app, None)  # on this machine only, until it takes over
            url = "http://{}:{}".format(*standby.getsockname()[:2])
            log.info("standby", extra=log_fields(url=url, **self._identity()))
            await self._wait_for_first(self._public_requested, self._stop_requested)
        if self._stop_requested.is_set():
            for sock in self.sockets.shared:
                sock.close()
        else:
            await self._go_public(public, force_conflicts=standby is not None)
        await self._stop_requested.wait()
        await self._drain()
        reloading.cancel()

    async def _go_public(self, public: socket.socket, *, force_conflicts: bool) -> None:
        if self.sockets.grpc is not None:
            await self._listen_grpc(self.sockets.grpc)
        await self._listen(public, self._app, self.security.tls)
        if self.sockets.health is not None:
            await self._listen_health(self.sockets.health)
        if force_conflicts:
            for sock in self.sockets.shared:
                take_over_port(sock)
        where = {"url": f"{self.security.scheme}://{self.options.public}", "grpc": str(self.options.grpc or "off")}
        log.info("ready", extra=log_fields(**where, **self._identity()))

    async def _listen(self, sock: socket.socket, app: Application, tls: Tls | None) -> None:
        context = None if tls is None else tls.context
        headers = [*self.headers, *self.security.headers]
        count_rejected = self.requests.metrics.count_rejected
        listener = Listener(app, sock, headers, _GRACE_SECONDS, context, count_rejected)
        task = asyncio.create_task(listener.run_until_stopped())
        self._running.add(task)
        await self._wait_for_first(listener.listening, task)
        if task.done():
            await task  # it ended before it listened: raise its error
        self._listeners.append(listener)

    async def _listen_grpc(self, sock: socket.socket) -> None:
        calls = Calls(self.repository, self.requests, self.headers, self.manager.max_body_bytes, self.security.keys)
        context = None if self.security.tls is None else self.security.tls.grpc_context
        self._rpc = GrpcListener(calls, sock, context, self.requests.metrics.count_rejected)
        await self._rpc.start()

    async def _listen_health(self, sock: socket.socket) -> None:
        listen = functools.partial(Listener, sock=sock, headers=self.headers, grace_seconds=1)
        self._health = HealthPort(listen, self.repository.ready)
        await self._health.start()

    async def _drain(self) -> None:
        """Become unready at once, answer every request that was accepted, then close the listeners."""
        self.repository.draining = True
        log.info("draining", extra=log_fields(**self._identity()))
        for listener in self._listeners:
            listener.stop()
        if self._rpc is not None:
            await self._rpc.stop(_GRACE_SECONDS)
        await asyncio.gather(*self._running)
        if self._health is not None:
            await self._health.stop()
        self.manager.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()
        log.info("stopped", extra=log_fields(**self._identity()))

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._public_requested.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """Drain; a second signal ends the process at once, as a thread stuck in an inference cannot be awaited."""
        if self._stop_requested.is_set():
            log.warning("second signal to end; ending at once", extra=log_fields(signal=number))
            os._exit(128 + number)
        self._stop_requested.set()

    @staticmethod
    async def _wait_for_first(*waited: asyncio.Event | asyncio.Task[None]) -> None:
        """Wait for the first of these; the others go on."""
        events = [asyncio.create_task(one.wait()) for one in waited if isinstance(one, asyncio.Event)]
        tasks = [one for one in waited if isinstance(one, asyncio.Task)]
        await asyncio.wait([*events, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()

    def _identity(self) -> dict[str, Any]:
        bundles = ",".join(model.find_version().bundle.digest[:12] for model in self.repository.models)
        return {"model": ",".join(self.repository.names), "bundle": bundles, "pid": os.getpid()}
