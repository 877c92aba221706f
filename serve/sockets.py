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

from pipeline.contract.errors import ResourceError

# asm-generic/socket.h and linux/bpf_common.h; Python's socket module has no names for them.
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 51
ACCEPTED_PER_TURN = 64  # of the event loop
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES_SECONDS = 0.5  # without accepting, until some may be closed
PAUSE_SECONDS = 0.005  # without accepting, until those who were accepted are served
_BPF_LOAD_BYTE, _BPF_JUMP_IF_SET, _BPF_RETURN = 0x30, 0x45, 0x06

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
    admin: socket.socket | None = None
    grpc: socket.socket | None = None
    health: socket.socket | None = None

    def all(self) -> list[socket.socket]:
        return [sock for sock in (self.public, self.standby, self.admin, self.grpc, self.health) if sock is not None]

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
    _attach(sock, _SO_ATTACH_REUSEPORT_CBPF, (_BPF_RETURN, 0, 0, 1))  # the socket with index 1


def stop_accepting(sock: socket.socket) -> None:
    """Let no new connection into the queue of a listening socket that is about to be closed.

    The kernel resets what is still in the queue at the close, after the client got its handshake.
    A client whose first packet is dropped instead repeats it, and is refused or meets the successor.
    """
    _attach(
        sock,
        _SO_ATTACH_FILTER,
        (_BPF_LOAD_BYTE, 0, 0, 13),  # the flags of the TCP header
        (_BPF_JUMP_IF_SET, 0, 1, 0x02),  # SYN
        (_BPF_RETURN, 0, 0, 0),  # drop
        (_BPF_RETURN, 0, 0, 0xFFFFFFFF),  # keep all of it
    )


def accept_waiting(sock: socket.socket) -> list[socket.socket]:
    """Accept all connections that wait in the queue of a listening socket, right before it is closed."""
    accepted = []
    with contextlib.suppress(OSError):
        while True:
            accepted.append(sock.accept()[0])
    return accepted


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
        self._loop.remove_reader(self._socket)
        self._loop.call_later(seconds, self._accept_again)

    def _accept_again(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._socket, self._accept)


def _attach(sock: socket.socket, option: int, *instructions: tuple[int, int, int, int]) -> None:
    """Attach a classic BPF program; other systems than Linux have none and live with the small gap it closes."""
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    try:
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("HL", len(instructions), ctypes.addressof(code)))
    except OSError as error:
        # A container without capabilities may not set one, and cannot change that.
        level = logging.INFO if error.errno == errno.EPERM else logging.WARNING
        log.log(level, "this kernel takes no socket filter (%s): a connection made in this moment may be reset", error)
