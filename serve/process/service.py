"""The models of one process and its public listeners: from loaded bundles to the last answer."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from serve.app import App
from serve.grpc.service import Calls
from serve.limits import BodyLimits, Budget, ProcessLimits
from serve.models import LoadedModel, make_repository
from serve.monitoring.logs import ConnectionLog
from serve.monitoring.request_log import RequestLog
from serve.monitoring.snapshot import Metrics
from serve.monitoring.tracing import Tracer
from serve.options import Options
from serve.sampling import Sampler
from serve.security import Security
from serve.shadow import Shadow
from serve.wire.listeners import Http1Listener, Http2Listener, Listener

GRACE_SECONDS = 25  # below the 30 that Kubernetes waits before it kills

Port = Literal["http", "grpc", "standby"]  # standby: HTTP on this machine only, before it takes over the public port


class Service:
    """Belongs to one event loop, from `listen` on."""

    def __init__(
        self,
        loaded: Sequence[LoadedModel],
        shadows: Sequence[Shadow],
        options: Options,
        security: Security,
        tracer: Tracer | None = None,
        served_by: int | None = None,
    ) -> None:
        """`served_by` is the process that clients know, if it is another one."""
        workers = options.workers
        self._security, self._tracer, self._limits = security, tracer, ProcessLimits.of_each(workers)
        self._pool = ThreadPoolExecutor(max(4, (os.cpu_count() or 1) // workers), thread_name_prefix="predict")
        self._budget = Budget(self._limits.request_bytes)
        self.repository = make_repository(loaded, options, self._pool, self._budget)
        for shadow in shadows:
            self.repository.find_model(shadow.name).set_shadow(shadow)
        self._sampler = Sampler(options.sampling) if options.sampling.share else None
        for version, _ in self.repository.loaded_versions():
            version.sampler = self._sampler
        counts = None if self._sampler is None else self._sampler.counts
        self.requests = RequestLog(Metrics(self.repository.loaded_versions, counts), options.log_requests, tracer)
        self._app = App(
            self.repository, self.requests, security.keys, page=options.page, budget=self._budget, sampler=self._sampler
        )
        self.headers = [("x-served-by", str(served_by or os.getpid()))]
        self._listeners: dict[Port, Listener[Any]] = {}
        self.on_connection_end: Callable[[], None] = lambda: None  # called at each end, from the next `listen` on

    async def listen(self, port: Port, sock: socket.socket | None) -> None:
        """Listen on this socket, or without one to the connections that `take` gets."""
        log, tls, limits = ConnectionLog(self.requests.metrics.count_rejected), self._security.tls, self._limits
        listener: Listener[Any]
        if port == "grpc":
            keys = self._security.keys
            # Which model's limits apply is known only once a message is parsed.
            bodies = zip(*(version.infer_limits for version, _ in self.repository.loaded_versions()), strict=True)
            most = BodyLimits(*map(max, bodies))
            calls = Calls(self.repository, self.requests, self.headers, most, keys, self._budget)
            context = None if tls is None else tls.grpc_context
            listener = Http2Listener(calls, sock, log, context, limits.grpc_connections, limits.call_bytes)
        else:
            context = None if tls is None or port == "standby" else tls.context
            headers = [*self.headers, *self._security.headers]
            connections, memory = limits.http_connections, limits.connection_bytes
            listener = Http1Listener(self._app, sock, headers, log, context, connections, memory)
        listener.peers.on_release = self.on_connection_end
        await listener.start()
        self._listeners[port] = listener

    def take(self, port: Port, client: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        self._listeners[port].take(client)

    @property
    def open_connections(self) -> int:
        listeners = self._listeners.values()
        return sum(len(listener.connections) + len(listener.handshakes.running) for listener in listeners)

    def become_unready(self) -> None:
        self.repository.drain()

    async def drain(self) -> None:
        """Answer every request that was accepted, and close the listeners."""
        self.become_unready()
        await asyncio.gather(*(listener.stop(GRACE_SECONDS) for listener in self._listeners.values()))

    def close(self) -> None:
        for model in self.repository.models:
            model.set_shadow(None)
        for pool in (self._pool, self._budget.decoders):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()
        if self._sampler is not None:
            self._sampler.close()

    def identity(self) -> dict[str, Any]:
        """Return what log lines say about this service."""
        bundles = ",".join(model.find_version().bundle.digest[:12] for model in self.repository.models)
        return {"model": ",".join(self.repository.names), "bundle": bundles}
