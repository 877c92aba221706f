"""Limits of connections by the address of the peer, for the ports of any protocol."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Any

_HOST_BYTES = 8  # of an IPv6 address: one customer gets at least a /64


class PeerLimits:
    """The number of connections of each peer address, and the maximum that one address may have."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum
        self._counts: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        """Count one more connection of the address, or return False if it has the maximum already."""
        if self._counts[address] >= self.maximum:
            return False
        self._counts[address] += 1
        return True

    def release(self, address: str) -> None:
        """Uncount a connection that was admitted."""
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def __len__(self) -> int:
        """Return the number of connections that are counted."""
        return self._counts.total()


def peer_address(peername: Any) -> str:
    """Return the address to count a transport's peer by: IPv6 by /64, and one for all peers without an address."""
    if not isinstance(peername, tuple) or not peername:
        return ""
    host = str(peername[0])
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return ""
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return address.packed[:_HOST_BYTES].hex()
