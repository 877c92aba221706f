"""What goes out on an HTTP/2 connection: answers, whole where the client's windows let them, else in pieces."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from serve.grpc.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FRAME_BYTES,
    HEAD,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MOST_WINDOW,
    Code,
    ConnectionFault,
    frame,
    reset,
    settings_of,
)
from serve.grpc.http2.stream import Stream
from serve.http1.limits import WRITE_SECONDS

_TURN_BYTES = 1 << 20  # are copied for the transport at once
_FRAME_BYTES = 1 << 18  # larger ones would hold up other answers, whatever the client allows


@dataclass(slots=True)
class Rest:
    """Of an answer."""

    stream: Stream
    data: memoryview
    trailers: bytes
    since: float  # when the client last made room for some of it


class Outbox:
    __slots__ = ("_moved", "_rests", "first_window", "frame_bytes", "held", "window")

    def __init__(self) -> None:
        self.window = self.first_window = FIRST_WINDOW
        self.frame_bytes = FRAME_BYTES
        self.held = 0  # bytes that wait
        self._rests: dict[int, Rest] = {}  # whose turn is next, first
        self._moved = 0.0  # when any of them did

    @property
    def waits(self) -> bool:
        return bool(self._rests)

    def answer(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> tuple[bytes, bool]:
        """What to write now, and whether it is all of it. Without a head, the trailers are."""
        if not head:
            return last(stream, trailers), True
        size, stream_id = len(body), stream.id
        if size <= self.window and size <= stream.window and size <= self.frame_bytes:
            self.window -= size
            parts = [
                HEAD.pack(0, len(head), HEADERS, END_HEADERS, stream_id),
                head,
                HEAD.pack(size >> 8, size & 0xFF, DATA, 0, stream_id),
                body,
                HEAD.pack(len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, END_HEADERS | END_STREAM, stream_id),
                trailers,
            ]
            if not stream.complete:
                parts.append(reset(stream_id, Code.NO_ERROR))
            return b"".join(parts), True
        self._rests[stream_id] = Rest(stream, memoryview(body), last(stream, trailers), time.monotonic())
        self.held += size
        return frame(HEADERS, END_HEADERS, stream_id, head), False

    def take(self) -> tuple[bytes, list[Stream]]:
        """What there is room for, a frame of each in turn, and whose answers are complete with it."""
        parts: list[bytes] = []
        done: list[Stream] = []
        size, most = 0, min(self.frame_bytes, _FRAME_BYTES)
        moved = True
        while moved and self.window > 0 and size < _TURN_BYTES:
            moved = False
            for rest in tuple(self._rests.values()):
                now = min(len(rest.data), rest.stream.window, self.window, most)
                if now <= 0 and rest.data:
                    continue
                moved = True
                size += now
                self._move(rest, now, parts)
                del self._rests[rest.stream.id]
                if rest.data:
                    self._rests[rest.stream.id] = rest  # behind the others
                else:
                    parts.append(rest.trailers)
                    done.append(rest.stream)
        return b"".join(parts), done

    def _move(self, rest: Rest, size: int, parts: list[bytes]) -> None:
        stream = rest.stream
        parts += (HEAD.pack(size >> 8, size & 0xFF, DATA, 0, stream.id), bytes(rest.data[:size]))
        rest.data = rest.data[size:]
        self._moved = rest.since = time.monotonic()
        stream.window -= size
        self.window -= size
        self.held -= size

    def drop(self, stream: Stream) -> None:
        """Nobody wants the rest."""
        if (rest := self._rests.pop(stream.id, None)) is not None:
            self.held -= len(rest.data)

    def stuck(self, now: float, *, paused: bool) -> list[Stream]:
        """Those whose client makes no room; while the transport itself is `paused`, that is nobody's fault here."""
        found = []
        for rest in self._rests.values():
            if paused:
                rest.since = now
            # With room of its own, it waits for its turn in the connection's.
            since = max(rest.since, self._moved) if rest.stream.window > 0 else rest.since
            if now - since > WRITE_SECONDS:
                found.append(rest.stream)
        return found

    def agree(self, payload: bytes, streams: Iterable[Stream]) -> None:
        """To the client's settings."""
        for key, value in settings_of(payload):
            if key == INITIAL_WINDOW_SIZE:
                change, self.first_window = value - self.first_window, value
                for stream in streams:
                    stream.window += change
                    if stream.window > MOST_WINDOW:
                        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window wider than any may be")
            elif key == MAX_FRAME_SIZE:
                self.frame_bytes = value

    def widen(self, size: int) -> None:
        if not size:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of nothing")
        self.window += size
        if self.window > MOST_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the window of the connection is wider than any may be")


def last(stream: Stream, block: bytes) -> bytes:
    """The frame that ends an answer, and the word to a client that is still sending that it need not."""
    made = frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block)
    return made if stream.complete else made + reset(stream.id, Code.NO_ERROR)
