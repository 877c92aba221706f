"""One HTTP listening socket served by uvicorn, and its end without a lost request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import uvicorn

from serve.http1.connection import Application, Connection
from serve.http1.limits import most_connections
from serve.sockets import admit_no_more

_KEEP_ALIVE_SECONDS = 65  # longer than the idle timeout of the proxies in front, as kserve has it
_NOTICE_SECONDS = 0.1  # a handshake that is under way takes one way there and back
_LINGER_SECONDS = 0.3
_LOOK_SECONDS = 0.005
_DATE_SECONDS = 1.0  # how old the date header may be


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
        secure: dict[str, Any] = {} if tls is None else {"ssl_context_factory": lambda *_: tls}
        super().__init__(
            uvicorn.Config(
                cast("Any", app),
                interface="asgi3",  # uvicorn is not to look for another; the application is no ASGI at all
                http=cast("Any", functools.partial(Connection, app=app, count_rejected=count_rejected)),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                headers=list(headers),
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=grace_seconds,
                limit_concurrency=most_connections(),
                **secure,
            )
        )
        self.socket = sock
        self.listening, self._stopping = asyncio.Event(), asyncio.Event()

    async def run_until_stopped(self) -> None:
        await self.serve(sockets=[self.socket])

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """uvicorn looks ten times a second whether it is to end; this one is told."""
        while not self.should_exit:
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DATE_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The service has signal handlers of its own, for all its listeners together."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn sets these at its first tick, which the first request may precede.
        self.server_state.default_headers = list(self.config.encoded_headers)
        await super().startup(sockets)
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Once a second. One look at all connections costs less than a timer in each."""
        now = asyncio.get_running_loop().time()
        for connection in tuple(self.server_state.connections):
            connection.sweep(now)  # type: ignore[union-attr]  # they are all ours
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn cuts off connections that have not sent their request yet; give those time to."""
        admit_no_more(self.socket)
        await asyncio.sleep(_NOTICE_SECONDS)  # accept what still waits in the kernel's queue
        for server in self.servers:
            server.close()
        linger = time.monotonic() + _LINGER_SECONDS  # and hear what was accepted
        while self.server_state.connections and time.monotonic() < linger:
            await asyncio.sleep(_LOOK_SECONDS)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        for sock in sockets or ():
            sock.close()
