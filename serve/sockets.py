"""Listening sockets: a port held by a stranger is refused, a port of our own predecessor can be taken over."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
import sys
from dataclasses import dataclass

from pipeline.spec.errors import ResourceError

_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h; Python's socket module has no name for it
_BPF_RET_K = 0x06

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


def reserve(address: Address, *, share: bool) -> socket.socket:
    """Bind, not yet listening. With `share`, beside a service of ours that holds the port; without, alone on it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ResourceError(f"address {address}: {error.strerror}; name another with --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(place)
        # Set after the bind it leaves this bind exclusive and still lets a successor bind beside us.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        sock.close()
        raise ResourceError(f"port {address}: {error.strerror}; stop what holds it, or name another port") from error
    sock.setblocking(False)
    return sock


def check_free(address: Address, *, share: bool) -> None:
    """For a port that another library binds: say now, in our words, what would be wrong with it."""
    reserve(address, share=share).close()


def prefer(sock: socket.socket) -> None:
    """Send every new connection to this socket, the second that listens on its port; the first keeps what it has.

    Without it the kernel goes on sharing new connections out to the predecessor, and those still in its
    queue when it closes are reset. When the predecessor is gone the rule names no socket and is void.
    """
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RET_K, 0, 0, 1))  # "return 1": the second socket
    program = struct.pack("HL", 1, ctypes.addressof(code))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
    except OSError as error:
        log.warning("takeover=shared reason=%r", f"this kernel cannot steer connections ({error.strerror})")
