"""One HTTP listening socket on uvicorn's server, which ends without losing a request."""

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
from serve.http1.limits import max_http_connections
from serve.sockets import stop_accepting

_KEEP_ALIVE_SECONDS = 65  # longer than the idle timeout of the proxies in front, as kserve has it
_NOTICE_SECONDS = 0.1  # for the handshakes that are under way: one round trip
_LINGER_SECONDS = 0.3
_POLL_SECONDS = 0.005
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
        tls_options: dict[str, Any] = {} if tls is None else {"ssl_context_factory": lambda *_: tls}
        super().__init__(
            uvicorn.Config(
                cast("Any", app),
                interface="asgi3",  # keeps uvicorn from wrapping the application, which is no ASGI one
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
                limit_concurrency=max_http_connections(),
                **tls_options,
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
        await super().startup(sockets)
        self.listening.set()

    async def on_tick(self, counter: int) -> bool:
        """Check all connections once a second, which costs less than a timer in each."""
        now = asyncio.get_running_loop().time()
        for connection in tuple(self.server_state.connections):
            connection.sweep(now)  # type: ignore[union-attr]  # they are all ours
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give connections that have not sent their request yet time to, where uvicorn closes them at once."""
        stop_accepting(self.socket)
        await asyncio.sleep(_NOTICE_SECONDS)  # accept what still waits in the kernel's queue
        for server in self.servers:
            server.close()
        linger = time.monotonic() + _LINGER_SECONDS  # for requests on connections that were accepted
        while self.server_state.connections and time.monotonic() < linger:
            await asyncio.sleep(_POLL_SECONDS)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
        for sock in sockets or ():
            sock.close()
