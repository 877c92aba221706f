"""The limits of connections, of both ports: their number, time, heads, frames, memory, and lines in the log.

Those of requests, from the first byte of a body on, are in `serve/limits.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Protocol

HANDSHAKE_TIMEOUT_SECONDS = 10.0
HEAD_TIMEOUT_SECONDS = 10.0  # for a head to arrive, from its first byte to its last
BODY_TIMEOUT_SECONDS = 60.0  # for a body, likewise
WRITE_TIMEOUT_SECONDS = 30.0  # for a client to take any byte of its response
LINGER_SECONDS = 2.0  # for a client to stop sending: closing on unread bytes would lose the response
KEEP_ALIVE_SECONDS = 65.0  # longer than the idle timeout of the proxies in front, as kserve's is
IDLE_SECONDS = 300.0  # of a gRPC connection
MAX_HEAD_BYTES = 32 << 10  # in HTTP/2 decoded, where each field counts 32 bytes more (RFC 9113, 6.5.2)
MAX_HEADERS = 128
MAX_URL_BYTES = 8 << 10
MAX_BLOCK_BYTES, MAX_BLOCK_FRAMES = 128 << 10, 64  # encoded; below it a head that is too long is answered with 431
MAX_STREAMS = 2048
MAX_QUEUED_BYTES = 64 << 20  # of answers for which the client opens no window
LOG_LINES_PER_SECOND = 20  # of each kind that clients can cause
_MAX_HTTP, _MAX_GRPC = 16 << 10, 2 << 10
_FILES_PER_GRPC = 8  # one of so many open files may be a gRPC connection
_OTHER_FILES = 128  # open files that are no connections of clients
_EVICTED_SHARE = 256  # one of so many connections is closed to make room, since finding the idle ones takes a while
MEMORY_BYTES = 64 << 20  # of all connections, for what has arrived, and as much for what clients have not read
MAX_CALL_BYTES = 256 << 20  # of memory that calls of all connections hold while they wait for their clients
UNSENT_HIGH_WATER_BYTES = 16 << 10  # of one connection; above it no more is written, and its bytes are accounted
_HOST_BYTES = 8  # of an IPv6 address: one customer gets at least a /64

# Costs are in control frames, which take about 2 microseconds. A usual header block costs less than its answer earns.
FIELDS_PER_COST = 16
ENCODED_BYTES_PER_COST = 8  # of a turn; long values in Huffman's code take as long as many fields
FLOOD_BUDGET, BUDGET_PER_SECOND = 2000, 500
CREDIT_PER_ANSWER = 8  # a call comes with a few control frames


class LimitedConnection(Protocol):
    """A connection of a listener; another one may evict it."""

    transport: asyncio.Transport

    def check_timeouts(self, now: float) -> None: ...

    def drain(self) -> None: ...

    @property
    def idle_until(self) -> float | None:
        """When it will be closed as idle; None while it has a request."""

    def give_way(self) -> None: ...


def max_http_connections() -> int:
    """Return as many as the system allows, up to a limit of ours; raises the soft limit of open files."""
    files = _files()
    return max(files // _FILES_PER_GRPC, min(_MAX_HTTP, files - _OTHER_FILES - max_grpc_connections()))


def max_grpc_connections() -> int:
    """Return the number of gRPC connections beside those: few, as each has room for many calls."""
    return min(_MAX_GRPC, _files() // _FILES_PER_GRPC)


def _files() -> int:
    """Return how many files this process may open, after raising the limit as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _MAX_HTTP + _MAX_GRPC + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft


def make_room(connections: Collection[LimitedConnection], limit: int) -> bool:
    """Close some that have been idle for longest, so that one more is allowed. False if all have requests."""
    if len(connections) < limit:
        return True
    idle = [(until, connection) for connection in connections if (until := connection.idle_until) is not None]
    idle.sort(key=lambda pair: pair[0])
    for _, connection in idle[: len(connections) + 1 - limit + limit // _EVICTED_SHARE]:
        connection.give_way()
    return len(connections) < limit


class PeerLimits:
    """The number of connections of each peer address, and the maximum that one address may have.

    That is half of all: a gateway has room for all its clients, and no address can shut out the others.
    """

    def __init__(self, connections: int) -> None:
        self.maximum = (connections + 1) // 2
        self.on_release: Callable[[], None] = lambda: None
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
        self.on_release()

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


class BufferLimit:
    """Bytes that all connections hold together.

    Above the limit the one that has held some for longest gives them up: a client that goes on is quicker than one
    that only takes up memory.
    """

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self.limit, self.held_bytes = limit, 0
        self._holders: dict[Callable[[], None], int] = {}  # in the order in which they began to hold any

    def hold(self, give_up: Callable[[], None], size: int) -> None:
        """Note how many bytes a connection holds now; `give_up` is called to make it hold none, and identifies it."""
        self.held_bytes += size - (self._holders.pop(give_up, 0) if not size else self._holders.get(give_up, 0))
        if size:
            self._holders[give_up] = size
        while self.held_bytes > self.limit:
            oldest = next(iter(self._holders))
            self.held_bytes -= self._holders.pop(oldest)
            oldest()


class CallMemory:
    """Memory that calls of all connections hold while they wait for their clients, and what frees some."""

    __slots__ = ("_evict", "held_bytes", "limit")

    def __init__(self, limit: int = MAX_CALL_BYTES, evict: Callable[[], bool] = lambda: False) -> None:
        self.limit, self._evict = limit, evict  # which ends a connection, and returns False if there is none to end
        self.held_bytes = 0

    def fits(self) -> bool:
        """End connections whose calls wait for their clients the longest, until the limit is kept."""
        while self.held_bytes > self.limit:
            if not self._evict():
                return False
        return True


class FloodGuard:
    """A budget for frames that cost the client nothing. Answers earn credit, so busy connections may send many."""

    __slots__ = ("_budget", "_refilled_at")

    def __init__(self) -> None:
        self._budget, self._refilled_at = FLOOD_BUDGET, time.monotonic()

    def charge(self, cost: int) -> bool:
        """Return False once the budget is used up."""
        self._budget -= cost
        if self._budget < 0:
            now = time.monotonic()
            self._budget += min(FLOOD_BUDGET, int((now - self._refilled_at) * BUDGET_PER_SECOND))
            self._refilled_at = now
        return self._budget >= 0

    def credit(self) -> None:
        if self._budget < FLOOD_BUDGET:
            self._budget += CREDIT_PER_ANSWER


class WriteTimeout:
    """The deadline of a client that reads nothing at all of its responses."""

    __slots__ = ("_due", "_unread")

    def __init__(self) -> None:
        self._unread, self._due = 0, 0.0

    def is_over(self, transport: asyncio.WriteTransport, now: float) -> bool:
        """Return True for a client that has read nothing since the deadline began; to be called now and then."""
        unread, before = transport.get_write_buffer_size(), self._unread
        self._unread = unread
        if unread and unread >= before and before:
            return now >= self._due
        self._due = now + WRITE_TIMEOUT_SECONDS
        return False


class WriteBackpressure:
    """Waits while a client has much of its responses to read."""

    __slots__ = ("_writable", "paused")

    def __init__(self) -> None:
        self.paused = False  # so much is unread that no more is to be written
        self._writable: asyncio.Future[None] | None = None

    def resume(self) -> None:
        """The client has read most of it, or is gone."""
        self.paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def drained(self, transport: asyncio.WriteTransport) -> None:
        while self.paused and not transport.is_closing():
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable
