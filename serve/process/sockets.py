"""Listening sockets: bind a port exclusively, or take it over from the previous service without a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.system.errors import ResourceError

# From Linux's headers; Python's socket module has no names for them.
_SO_ATTACH_REUSEPORT_CBPF, _BPF_RETURN = 51, 0x06
_IP_MINTTL, _IPV6_MINHOPCOUNT, _MAX_HOPS = 21, 73, 255
NOTICE_SECONDS = 0.1  # for the handshakes that are under way: one round trip
ACCEPTED_PER_TURN = 64  # of the event loop
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES_SECONDS = 0.5  # without accepting, until some may be closed
PAUSE_SECONDS = 0.005  # without accepting, until those who were accepted are served

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Sockets:
    """The sockets of a service: bound, and not listening yet."""

    public: socket.socket
    standby: socket.socket | None = None
    grpc: socket.socket | None = None
    health: socket.socket | None = None

    def all(self) -> list[socket.socket]:
        return [sock for sock in (self.public, self.standby, self.grpc, self.health) if sock is not None]

    @property
    def shared(self) -> list[socket.socket]:
        """Return those on whose ports a successor may listen, too."""
        return [sock for sock in (self.public, self.grpc, self.health) if sock is not None]


def bind_socket(address: Address, *, share: bool) -> socket.socket:
    """Bind without listening; with `share` beside another service of ours on the port, else exclusively."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ResourceError(f"address {address}: {error.strerror}; choose another with --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(place)
        # Set after the bind it leaves this bind exclusive and still lets a successor bind beside us.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        sock.close()
        raise ResourceError(f"port {address}: {error.strerror}; stop its process, or choose another port") from error
    sock.setblocking(False)
    return sock


def take_over_port(sock: socket.socket) -> None:
    """Send every new connection to this socket, the second that listens on its port; the first keeps what it has.

    Without it the kernel goes on sharing new connections out to the predecessor. When that is gone the
    rule names no socket and is void.
    """
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 1))  # the socket with index 1
    try:
        program = struct.pack("HL", 1, ctypes.addressof(code))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        # A container without capabilities may not set one, and cannot change that.
        level = logging.INFO if error.errno == errno.EPERM else logging.WARNING
        log.log(level, "cannot send all new connections here (%s): the predecessor gets some until it ends", error)


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

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[socket.socket], None],
        reject: Callable[[str, str], None],
    ) -> None:
        """`take` gets each connection; `reject` the reason and the text of a failure, for metrics and the log."""
        self._socket, self._take, self._reject = sock, take, reject
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
                self._reject("no_files", str(error))
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
