"""A transport without a network, which keeps what is written."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) ")


class FakeTransport:
    """A replacement of uvloop's transport; `unsent` grows instead of `written` while `blocked`."""

    def __init__(self, peer: str = "192.0.2.1") -> None:
        self.peer, self.connection = peer, cast("asyncio.Protocol", None)
        self.written, self.unsent = bytearray(), bytearray()
        self.blocked = self.closing = self.reading_paused = self.lost = False
        self.high_water = 64 << 10

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in STATUS_LINE.findall(self.written)]

    def get_extra_info(self, name: str) -> Any:
        return (self.peer, 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        self.high_water = high

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def write(self, data: bytes) -> None:
        if self.closing:
            return
        (self.unsent if self.blocked else self.written).extend(data)
        if len(self.unsent) > self.high_water:
            self.connection.pause_writing()

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.lost = True
        self.connection.connection_lost(None)
