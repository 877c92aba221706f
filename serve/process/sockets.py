"""The ports of a service: bind one exclusively, or take it over from the previous service without a lost connection."""

from __future__ import annotations

import ctypes
import errno
import logging
import socket
import struct
import sys
from dataclasses import dataclass

from pipeline.system.errors import ResourceError

# From Linux's headers; Python's socket module has no names for them.
_SO_ATTACH_REUSEPORT_CBPF, _BPF_RETURN = 51, 0x06

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
