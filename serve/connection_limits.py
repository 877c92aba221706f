"""Connection limits for each peer address: one client must not take all the room that others need."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter


class PeerLimits:
    """Counts connections by address, up to a maximum for each."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._counts: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        """Count one more connection of this address; return False where it has the maximum already."""
        if self._counts[address] >= self.maximum:
            return False
        self._counts[address] += 1
        return True

    def release(self, address: str) -> None:
        """Count one connection less."""
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Return the address that limits count for: the host, or the /64 network of IPv6, which one client may own.

    Clients on a Unix socket, and others without an address, count as one.
    """
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return ""
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return str(peer[0])
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(ipaddress.ip_network((address, 64), strict=False) if mapped is None else mapped)
    return str(address)
