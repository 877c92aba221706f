"""Connections between accept and their first byte: TLS handshakes are counted, limited in number and time, and logged.

asyncio's servers report a connection only after its handshake, so that clients which never finish one would take up
files and memory unseen. Without TLS there is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from serve.wire.connection_limits import HANDSHAKE_TIMEOUT_SECONDS, PeerLimits, peer_address
from serve.wire.log import Log


class Handshakes:
    """Turns accepted sockets into connections of the event loop."""

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
