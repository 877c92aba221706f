"""The life of the service: listen, take over a port, drain, end; kserve's ModelServer with its own start and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvloop
from kserve import ModelServer

from serve.admin import Admin
from serve.app import App
from serve.grpc.listener import GrpcListener
from serve.grpc.service import Calls
from serve.http1.connection import Application
from serve.http1.listener import Listener
from serve.logs import log_fields
from serve.models import LoadedModel, ModelManager, OnnxDataPlane, OnnxModel
from serve.options import Options
from serve.prometheus import Metrics
from serve.request_log import RequestLog
from serve.security import Security, Tls, reload_changed_files
from serve.shadow import Shadow
from serve.sockets import Sockets, take_over_port
from serve.tracing import Tracer

_GRACE_SECONDS = 25  # below the 30 that Kubernetes waits before it kills

log = logging.getLogger(__name__)


class Service(ModelServer):  # type: ignore[misc]  # kserve ships no types
    """kserve's start and stop bind every interface and unload models under requests; these do not."""

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
        super().__init__(
            http_port=options.public.port,
            enable_grpc=options.grpc is not None,
            enable_latency_logging=False,
            grace_period=_GRACE_SECONDS,
        )
        self.options, self.sockets, self.security, self._token = options, sockets, security, token
        self._pool = ThreadPoolExecutor(max(4, os.cpu_count() or 1), thread_name_prefix="predict")
        self.dataplane = OnnxDataPlane(self.registered_models)
        self.manager = ModelManager(self.dataplane, options, self._pool, loaded)
        for shadow in shadows:
            self.manager.set_shadow(shadow)
        self.requests = RequestLog(Metrics(self.dataplane.loaded_versions), options.log_requests, tracer)
        self._tracer = tracer
        self._app = App(self.dataplane, self.requests, security.keys, page=options.page)
        self.headers = [("x-served-by", str(os.getpid()))]
        self._public_requested, self._stop_requested = asyncio.Event(), asyncio.Event()
        self._listeners: list[Listener] = []
        self._rpc: GrpcListener | None = None
        self._running: set[asyncio.Task[None]] = set()

    @property
    def models(self) -> list[OnnxModel]:
        return self.dataplane.models

    def start(self, models: list[Any]) -> None:
        """Serve until a signal ends it."""
        self._register_and_check_atleast_one_model_is_ready(models)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.register_signal_handler()
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
            for sock in filter(None, (public, self.sockets.grpc)):
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
        if force_conflicts:
            for sock in filter(None, (public, self.sockets.grpc)):
                take_over_port(sock)
        where = {"url": f"{self.security.scheme}://{self.options.public}", "grpc": str(self.options.grpc or "off")}
        log.info("ready", extra=log_fields(**where, **self._identity()))

    async def _listen(self, sock: socket.socket, app: Application, tls: Tls | None) -> None:
        context = None if tls is None else tls.context
        headers = [*self.headers, *self.security.headers]
        count_rejected = self.requests.metrics.count_rejected
        listener = Listener(app, sock, headers, self.grace_period, context, count_rejected)
        task = asyncio.create_task(listener.run_until_stopped())
        self._running.add(task)
        await self._wait_for_first(listener.listening, task)
        if task.done():
            await task  # it ended before it listened: raise its error
        self._listeners.append(listener)

    async def _listen_grpc(self, sock: socket.socket) -> None:
        calls = Calls(self.dataplane, self.requests, self.headers, self.manager.max_body_bytes, self.security.keys)
        context = None if self.security.tls is None else self.security.tls.grpc_context
        self._rpc = GrpcListener(calls, sock, context, self.requests.metrics.count_rejected)
        await self._rpc.start()

    async def _drain(self) -> None:
        """Become unready at once, answer every request that was accepted, then close the listeners."""
        self.dataplane.draining = True
        log.info("draining", extra=log_fields(**self._identity()))
        for listener in self._listeners:
            listener.stop()
        if self._rpc is not None:
            await self._rpc.stop(self.grace_period)
        await asyncio.gather(*self._running)
        self.manager.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()
        log.info("stopped", extra=log_fields(**self._identity()))

    def register_signal_handler(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._public_requested.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)

    def stop(self, sig: int) -> None:
        """Drain; a second signal ends the process at once, as a thread stuck in an inference cannot be awaited."""
        if self._stop_requested.is_set():
            log.warning("second signal to end; ending at once", extra=log_fields(signal=sig))
            os._exit(128 + sig)
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
        bundles = ",".join(model.find_version().bundle.digest[:12] for model in self.models)
        return {"model": ",".join(self.dataplane.names), "bundle": bundles, "pid": os.getpid()}
