"""Listening sockets: accept in the event loop, and close without a connection that the client believes to have."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable

from serve.wire.request import Log

# From Linux's headers; Python's socket module has no names for them.
_IP_MINTTL, _IPV6_MINHOPCOUNT, _MAX_HOPS = 21, 73, 255
NOTICE_SECONDS = 0.1  # for the handshakes that are under way: one round trip
ACCEPTED_PER_TURN = 64  # of the event loop
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES_SECONDS = 0.5  # without accepting, until some may be closed
PAUSE_SECONDS = 0.005  # without accepting, until those who were accepted are served


async def close_listener(sock: socket.socket) -> list[socket.socket]:
    """Close a listening socket, from which nothing accepts any more; return the connections in its queue.

    The kernel resets what is in the queue at the close, after the client got its handshake. So no new handshake is
    answered before: a client repeats its first packet, and is refused or meets the successor.
    """
    sock.setblocking(False)
    _set_min_hops(sock, _MAX_HOPS)
    await asyncio.sleep(NOTICE_SECONDS)
    clients = []
    with contextlib.suppress(OSError):
        while True:
            clients.append(sock.accept()[0])
    sock.close()
    for client in clients:
        _set_min_hops(client, 0)  # a connection inherits it from its listener
    return clients


def _set_min_hops(sock: socket.socket, hops: int) -> None:
    """Ignore packets with a lower TTL or hop limit; clients send them with 64, rarely more.

    On a listening socket Linux applies it to the first packet of a handshake and not to the last. It takes no
    privileges, unlike a socket filter. Other systems live with the small gap.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MINHOPCOUNT, hops)
        sock.setsockopt(socket.IPPROTO_IP, _IP_MINTTL, hops)  # also for IPv4 clients of an IPv6 socket


class Acceptor:
    """Accepts the connections of a listening socket in the event loop; pauses while no file can be opened."""

    def __init__(self, sock: socket.socket, take: Callable[[socket.socket], None], log: Log) -> None:
        """`take` gets each connection."""
        self._socket, self._take, self._log = sock, take, log
        self._loop = asyncio.get_running_loop()
        self._is_open = False

    def start(self, backlog: int) -> None:
        self._socket.setblocking(False)
        self._socket.listen(backlog)
        self._is_open = True
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more."""
        self._is_open = False
        self._loop.remove_reader(self._socket)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_PER_TURN):
            try:
                client, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._log.refused("no_files", reason=str(error))
                self.pause(_NO_FILES_SECONDS)
                return
            client.setblocking(False)
            self._take(client)

    def pause(self, seconds: float = PAUSE_SECONDS) -> None:
        """Leave connections in the kernel's queue for a while."""
        if not self._is_open:
            return
        self._loop.remove_reader(self._socket)
        self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._socket, self._accept)
