"""The service process: its models, listeners and signals, port take-over, drain and end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop

from serve.admin import STATUS, Admin, Fields, ModelChanges, Reply
from serve.app import App
from serve.control_thread import ControlThread
from serve.grpc.service import Calls
from serve.health import Health, Heartbeat
from serve.http1.connection import Application
from serve.listeners import GrpcListener, Listener
from serve.logs import log_fields, log_loop_exception
from serve.models import LoadedModel, ModelManager, ModelRepository
from serve.options import Options
from serve.request_log import RequestLog
from serve.security import Security, Tls, reload_changed_files
from serve.shadow import Shadow
from serve.snapshot import Metrics
from serve.sockets import Sockets, take_over_port
from serve.tracing import Tracer

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
        self._changes = ModelChanges(self.manager)
        self.requests = RequestLog(Metrics(self.repository.loaded_versions), options.log_requests, tracer)
        self._tracer = tracer
        self._app = App(self.repository, self.requests, security.keys, page=options.page)
        self.headers = [("x-served-by", str(os.getpid()))]
        self._public_requested, self._stop_requested = asyncio.Event(), asyncio.Event()
        self._listeners: list[Listener] = []
        self._rpc: GrpcListener | None = None
        self._control: ControlThread | None = None
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
        self._loop, self._heartbeat = asyncio.get_running_loop(), Heartbeat()
        if admin is not None and self._token is not None:
            await self._listen_control(admin, Admin(self._perform, self._token))
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
        self._heartbeat.stop()
        reloading.cancel()

    async def _go_public(self, public: socket.socket, *, force_conflicts: bool) -> None:
        if self.sockets.grpc is not None:
            await self._listen_grpc(self.sockets.grpc)
        await self._listen(public, self._app, self.security.tls)
        if self.sockets.health is not None:
            await self._listen_control(self.sockets.health, Health(self._heartbeat.is_live, self.repository.ready))
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

    async def _listen_control(self, sock: socket.socket, app: Application) -> None:
        self._control = self._control or ControlThread()
        listen = functools.partial(Listener, app, sock, headers=self.headers, grace_seconds=_GRACE_SECONDS)
        await self._control.listen(listen)

    async def _perform(self, path: str, fields: Fields) -> Reply:
        """Answer a request to the admin interface, in the thread of the control ports; changes happen in the loop."""
        performing = self._changes.perform(path, fields)
        if path == STATUS:
            return await performing
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(performing, self._loop))

    async def _drain(self) -> None:
        """Become unready at once, answer every request that was accepted, then close the listeners."""
        self.repository.draining = True
        log.info("draining", extra=log_fields(**self._identity()))
        for listener in self._listeners:
            listener.stop()
        if self._rpc is not None:
            await self._rpc.stop(_GRACE_SECONDS)
        await asyncio.gather(*self._running)
        if self._control is not None:
            await self._control.stop()
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
