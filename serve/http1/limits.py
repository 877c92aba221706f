"""Many connections, and some that only take up room: how many there may be, who gives way, who is stuck."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from typing import Protocol

WRITE_SECONDS = 30.0  # for a client to take any byte of its answer
_MOST, _MOST_RPC = 16 << 10, 2 << 10
_SHARE = 8  # one of so many files is for a connection of gRPC
_OTHERS = 128  # files that are no connections of clients


class Seat(Protocol):
    """A connection, as others see it."""

    @property
    def idle_until(self) -> float | None:
        """When it will be given up; None while a request of it is served."""
        ...

    def give_way(self) -> None: ...


def most_connections() -> int:
    """As many as the system lets this process have, within reason; it is asked for all it lets us."""
    files = _files()
    return max(_OTHERS, min(_MOST, files - _OTHERS - min(_MOST_RPC, files // _SHARE)))


def most_rpc_connections() -> int:
    """Of gRPC, beside those: few, as each has room for many calls."""
    return min(_MOST_RPC, _files() // _SHARE)


def _files() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST + _MOST_RPC + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


def make_room(seats: Collection[Seat], most: int) -> bool:
    """For one more: those that have been silent for longest give way. False where all are being served."""
    if len(seats) < most:
        return True
    idle = [(until, seat) for seat in seats if (until := seat.idle_until) is not None]
    idle.sort(key=lambda one: one[0])
    leaving = idle[: len(seats) + 1 - most]
    for _, seat in leaving:
        seat.give_way()
    return len(seats) < most


class Outflow:
    """What a client has not taken yet of its answers. One that takes nothing at all for a while is stuck."""

    __slots__ = ("_due", "_left", "_writable", "paused")

    def __init__(self) -> None:
        self._left, self._due = 0, 0.0
        self.paused = False  # so much is left that no more is to be written
        self._writable: asyncio.Future[None] | None = None

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """It has taken most of it, or is gone."""
        self.paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def drained(self, transport: asyncio.WriteTransport) -> None:
        while self.paused and not transport.is_closing():
            self._writable = asyncio.get_running_loop().create_future()
            await self._writable

    def stuck(self, transport: asyncio.WriteTransport, now: float) -> bool:
        """Asked now and then."""
        left, before = transport.get_write_buffer_size(), self._left
        self._left = left
        if left and left >= before and before:
            return now >= self._due
        self._due = now + WRITE_SECONDS
        return False
