"""Accept TLS connections: unfinished handshakes are counted, limited in number and time, and logged at a bounded rate.

asyncio's servers report a connection only after its handshake, so that clients which never finish one would take up
files and memory unseen.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from serve.connection_limits import PeerLimits, peer_address
from serve.logs import log_fields, refusals

HANDSHAKE_TIMEOUT_SECONDS = 10.0
_ACCEPTED_PER_TURN = 64  # of the event loop
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES_PAUSE_SECONDS = 0.5

log = logging.getLogger(__name__)


class TlsAcceptor:
    """A listening socket whose connections begin with a TLS handshake; has the methods of asyncio.Server in use."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        make_connection: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool],
        max_handshakes: int,
        count_rejected: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`has_room` gets the number of handshakes and returns whether one more connection is allowed beside them."""
        self._socket, self._context, self._make_connection = sock, context, make_connection
        self._has_room, self._max_handshakes, self._count_rejected = has_room, max_handshakes, count_rejected
        self.handshakes: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._peers = PeerLimits(max(1, max_handshakes // 2))
        self._loop = asyncio.get_running_loop()
        self._closed = False

    def start(self, backlog: int) -> None:
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more; handshakes that have begun go on."""
        self._closed = True
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """End the handshakes that are not finished."""
        for handshake in self.handshakes:
            handshake.cancel()
        await asyncio.gather(*self.handshakes, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            try:
                client, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._reject("no_files", str(error))
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_NO_FILES_PAUSE_SECONDS, self._accept_again)
                return
            peer = peer_address(address)
            if not self._peers.admit(peer):
                self._reject("tls_handshakes", f"{self._peers.maximum} handshakes from this address are not finished")
                client.close()
                continue
            if len(self.handshakes) >= self._max_handshakes:
                next(iter(self.handshakes)).cancel()
            if not self._has_room(len(self.handshakes)):
                self._reject("connections", "all connections are being served already")
                self._peers.release(peer)
                client.close()
                continue
            handshake = self._loop.create_task(self._shake_hands(client, peer))
            self.handshakes[handshake] = None

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    async def _shake_hands(self, client: socket.socket, peer: str) -> None:
        try:
            client.setblocking(False)
            await self._loop.connect_accepted_socket(
                self._make_connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_SECONDS,
            )
        except OSError as error:  # ssl.SSLError and timeouts are too
            self._reject("tls_handshake", str(error))
        except asyncio.CancelledError:
            self._reject("tls_handshake", "others wait for room")
            raise
        finally:
            self._peers.release(peer)
            handshake = asyncio.current_task()
            assert handshake is not None
            del self.handshakes[handshake]

    def _reject(self, reason: str, text: str) -> None:
        self._count_rejected(reason)
        if refusals.allows():
            log.info("refused", extra=log_fields(reason=text))
