"""The life of the service: health port, standby, taking over the public ports, drain and end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

import orjson
import uvloop

from serve.monitoring.logs import ConnectionLog, log_fields, log_loop_exception
from serve.options import Options
from serve.process.service import GRACE_SECONDS, Port, Service
from serve.process.sockets import take_over_port
from serve.routes import JSON, PATHS
from serve.security import Security, reload_changed_files
from serve.wire.http1 import Request
from serve.wire.listeners import Http1Listener, Listener

log = logging.getLogger(__name__)


class Server(ABC):
    """Serves until a signal ends it: in this process, or in several."""

    def __init__(self, options: Options, sockets: Mapping[str, socket.socket], security: Security) -> None:
        """The sockets, by the names of their ports, are bound already and not listening yet."""
        self.options, self.sockets, self.security = options, sockets, security
        self._public_requested, self._stop_requested = asyncio.Event(), asyncio.Event()

    @abstractmethod
    async def start(self) -> None:
        """Get ready to answer."""

    @abstractmethod
    async def listen(self, port: Port, sock: socket.socket) -> None: ...

    @abstractmethod
    async def listen_health(self, health: Health, sock: socket.socket) -> None:
        """Listen where no load on the other ports delays an answer."""

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """Return the versions of each model and their roles."""

    @abstractmethod
    def is_live(self) -> bool: ...

    @abstractmethod
    def is_ready(self) -> bool: ...

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what log lines say about this service."""

    @abstractmethod
    async def drain(self) -> None:
        """Become unready at once, answer every request that was accepted, and close all listeners."""

    async def serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(log_loop_exception)
        self._handle_signals()
        await self.start()
        if (standby := self.sockets.get("standby")) is not None and not self._stop_requested.is_set():
            await self.listen("standby", standby)
            self._log("standby", url="http://{}:{}".format(*standby.getsockname()[:2]))
            await wait_for_first(self._public_requested, self._stop_requested)
        if self._stop_requested.is_set():
            for sock in self._shared_sockets():
                sock.close()
        else:
            await self._go_public()
        await self._stop_requested.wait()
        self._log("draining")
        await self.drain()
        self._log("stopped")

    async def _go_public(self) -> None:
        sockets, addresses = self.sockets, self.options.addresses
        if "grpc" in sockets:
            await self.listen("grpc", sockets["grpc"])
        await self.listen("http", sockets["http"])
        if "health" in sockets:
            await self.listen_health(Health(self.is_live, self.is_ready, self.status), sockets["health"])
        if "standby" in sockets:  # there may be a predecessor
            for sock in self._shared_sockets():
                take_over_port(sock)
        url = f"{self.security.scheme}://{addresses['http']}"
        self._log("ready", url=url, grpc=str(addresses.get("grpc", "off")))

    def _shared_sockets(self) -> list[socket.socket]:
        """Return those on whose ports a successor may listen, too."""
        return [sock for port, sock in self.sockets.items() if port != "standby"]

    def _log(self, state: str, **fields: Any) -> None:
        log.info(state, extra=log_fields(**fields, **self.identity(), pid=os.getpid()))

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


class ControlThread:
    """A thread that answers on the health port, whatever the event loop of the predictions does.

    The methods are called in that loop; the thread has its own.
    """

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()

    async def listen(self, make_listener: Callable[[], Listener[Any]]) -> None:
        """Serve the listener that `make_listener` returns in the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(make_listener), self._loop))

    async def stop(self, grace_seconds: float) -> None:
        """Let the listener answer what it has received, and end the thread."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listener.stop(grace_seconds), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _listen(self, make_listener: Callable[[], Listener[Any]]) -> None:
        self._listener = make_listener()
        await self._listener.start()


class SingleServer(Server):
    """The models and the listeners are in this process."""

    def __init__(self, service: Service, *args: Any) -> None:
        super().__init__(*args)
        self._service = service
        self._control: ControlThread | None = None

    def run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve())

    async def start(self) -> None:
        self._heartbeat = Heartbeat()
        self._reloading = asyncio.create_task(reload_changed_files(self.security.reloaded_files()))

    async def listen(self, port: Port, sock: socket.socket) -> None:
        await self._service.listen(port, sock)

    async def listen_health(self, health: Health, sock: socket.socket) -> None:
        self._control = ControlThread()
        headers = self._service.headers
        await self._control.listen(functools.partial(Http1Listener, health, sock, headers, ConnectionLog()))

    async def status(self) -> dict[str, Any]:
        return self._service.repository.status()

    def is_live(self) -> bool:
        return self._heartbeat.is_live()

    def is_ready(self) -> bool:
        return self._service.repository.ready()

    def identity(self) -> dict[str, Any]:
        return self._service.identity()

    async def drain(self) -> None:
        await self._service.drain()
        if self._control is not None:
            await self._control.stop(GRACE_SECONDS)
        self._service.close()
        self._heartbeat.stop()
        self._reloading.cancel()


async def wait_for_first(*events: asyncio.Event) -> None:
    """Wait for the first of these events."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


BEAT_SECONDS = 0.5
STUCK_SECONDS = 10.0  # without a turn of the event loop
_LIVE, _READY = PATHS["live"][0], PATHS["ready"][0]
STATUS = "/status"


class Health:
    """The application of the health port: liveness, readiness and status.

    A service is live as long as its event loop makes turns.
    """

    request_class = Request

    def __init__(
        self, is_live: Callable[[], bool], is_ready: Callable[[], bool], status: Callable[[], Awaitable[Any]]
    ) -> None:
        self._is_live, self._is_ready, self._status = is_live, is_ready, status

    def begin(self, request: Request) -> Coroutine[Any, Any, None] | None:
        """Answer the two paths of the Open Inference Protocol, and the versions with their roles."""
        if request.method == "GET" and request.path == STATUS:
            return self._answer_status(request)
        live = self._is_live()
        ready = live and self._is_ready()
        body: dict[str, bool] | dict[str, str]
        answers = {_LIVE: (live, {"live": live}), _READY: (ready, {"ready": ready, "live": live})}
        if request.method not in ("GET", "HEAD") or request.path not in answers:
            status, body = HTTPStatus.NOT_FOUND, {"error": f"only GET {_LIVE}, {_READY} and {STATUS} are here"}
        else:
            healthy, body = answers[request.path]
            status = HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE
        request.respond_now(status, (JSON,), orjson.dumps(body))
        return None

    async def _answer_status(self, request: Request) -> None:
        await request.respond(HTTPStatus.OK, (JSON,), orjson.dumps(await self._status()))


async def beat(note: Callable[[float], None]) -> None:
    """Note the time whenever the event loop has made a turn, until cancelled."""
    while True:
        note(time.monotonic())
        await asyncio.sleep(BEAT_SECONDS)


class Heartbeat:
    """Whether the event loop in which it was started makes turns; any thread may ask."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._beating = asyncio.create_task(beat(self._note))

    def is_live(self) -> bool:
        return time.monotonic() - self._turned_at < STUCK_SECONDS

    def stop(self) -> None:
        self._beating.cancel()

    def _note(self, now: float) -> None:
        self._turned_at = now
