"""Connection limits: maximum count, idle eviction, stalled writers."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from typing import Protocol

WRITE_TIMEOUT_SECONDS = 30.0  # for a client to take any byte of its response
_MAX_HTTP, _MAX_GRPC = 16 << 10, 2 << 10
_FILES_PER_GRPC = 8  # one of so many open files may be a gRPC connection
_OTHER_FILES = 128  # open files that are no connections of clients


class LimitedConnection(Protocol):
    """A connection that another one may evict."""

    @property
    def idle_until(self) -> float | None:
        """When it will be closed as idle; None while it has a request."""
        ...

    def give_way(self) -> None: ...


def max_http_connections() -> int:
    """Return as many as the system allows, up to a limit of ours; raises the soft limit of open files."""
    files = _files()
    return max(_OTHER_FILES, min(_MAX_HTTP, files - _OTHER_FILES - min(_MAX_GRPC, files // _FILES_PER_GRPC)))


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
    """Close those that have been idle for longest, so that one more is allowed. False if all have requests."""
    if len(connections) < limit:
        return True
    idle = [(until, connection) for connection in connections if (until := connection.idle_until) is not None]
    idle.sort(key=lambda pair: pair[0])
    for _, connection in idle[: len(connections) + 1 - limit]:
        connection.give_way()
    return len(connections) < limit


class WriteBackpressure:
    """What a client has not read yet of its responses; one that reads nothing at all for a while is stalled."""

    __slots__ = ("_due", "_unread", "_writable", "paused")

    def __init__(self) -> None:
        self._unread, self._due = 0, 0.0
        self.paused = False  # so much is unread that no more is to be written
        self._writable: asyncio.Future[None] | None = None

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """The client has read most of it, or is gone."""
        self.paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def drained(self, transport: asyncio.WriteTransport) -> None:
        while self.paused and not transport.is_closing():
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def is_stalled(self, transport: asyncio.WriteTransport, now: float) -> bool:
        """Return True for a client that has read nothing since the deadline began; to be called now and then."""
        unread, before = transport.get_write_buffer_size(), self._unread
        self._unread = unread
        if unread and unread >= before and before:
            return now >= self._due
        self._due = now + WRITE_TIMEOUT_SECONDS
        return False
