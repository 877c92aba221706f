"""One stream of an HTTP/2 connection, and the queue of answers that wait for the client's flow control windows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from serve.grpc.http2.frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
    frame,
    parse_settings,
    rst_stream,
)


class Stream:
    __slots__ = (
        "cancelled",
        "complete",
        "content_length",
        "head",
        "id",
        "opened_at",
        "parts",
        "running",
        "sending",
        "size",
        "state",
        "unacknowledged",
        "window",
    )

    def __init__(self, stream_id: int, window: int, head: Any, content_length: int | None) -> None:
        self.id = stream_id
        self.window = window  # bytes the client will take
        self.head = head  # what Application.parse_head returned
        self.content_length = content_length
        self.state: Any = None  # for the application
        self.parts: list[bytes] = []  # of the request's body
        self.size = 0  # bytes of the body received so far
        self.unacknowledged = 0  # received bytes that no WINDOW_UPDATE has returned yet
        self.complete = False  # the whole request was received
        self.running = False  # the application computes the answer
        self.sending = False  # the answer is being sent; the rest of the request is ignored
        self.cancelled = False  # the client reset the stream or disconnected
        self.opened_at = time.monotonic()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def widen(self, size: int) -> None:
        if not size:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE must not be 0")
        self.window += size
        if self.window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, f"the stream's window exceeds {MAX_WINDOW}")


WRITE_TIMEOUT_SECONDS = 30.0  # for a client to take any byte of its answer
_BATCH_BYTES = 1 << 20  # handed to the transport at once
_MAX_DATA_BYTES = 1 << 18  # of one frame, even if the client allows more: a larger one would delay other answers


@dataclass(slots=True)
class QueuedAnswer:
    """The part of an answer that was not sent yet."""

    stream: Stream
    data: memoryview
    trailers: bytes
    progress_at: float  # when the client last took some of it


class SendQueue:
    __slots__ = ("_progress_at", "_queued", "frame_bytes", "initial_window", "queued_bytes", "window")

    def __init__(self) -> None:
        self.window = self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = MAX_FRAME_BYTES
        self.queued_bytes = 0
        self._queued: dict[int, QueuedAnswer] = {}  # in the order of their turns
        self._progress_at = 0.0  # when the client last took some of any answer

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def add(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> tuple[bytes, bool]:
        """Return the bytes to write now, and whether they are the whole answer. Without a head it is only trailers."""
        if not head:
            return final_frames(stream, trailers), True
        size, stream_id = len(body), stream.id
        if size <= self.window and size <= stream.window and size <= self.frame_bytes:
            self.window -= size
            parts = [
                FRAME_HEADER.pack(0, len(head), HEADERS, END_HEADERS, stream_id),
                head,
                FRAME_HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream_id),
                body,
                FRAME_HEADER.pack(
                    len(trailers) >> 8, len(trailers) & 0xFF, HEADERS, END_HEADERS | END_STREAM, stream_id
                ),
                trailers,
            ]
            if not stream.complete:
                parts.append(rst_stream(stream_id, ErrorCode.NO_ERROR))
            return b"".join(parts), True
        answer = QueuedAnswer(stream, memoryview(body), final_frames(stream, trailers), time.monotonic())
        self._queued[stream_id] = answer
        self.queued_bytes += size
        return frame(HEADERS, END_HEADERS, stream_id, head), False

    def take(self) -> tuple[bytes, list[Stream]]:
        """Return as many frames as the windows allow, one of each answer in turn, and the streams that are complete."""
        parts: list[bytes] = []
        completed: list[Stream] = []
        size, frame_bytes = 0, min(self.frame_bytes, _MAX_DATA_BYTES)
        progress = True
        while progress and self.window > 0 and size < _BATCH_BYTES:
            progress = False
            for answer in tuple(self._queued.values()):
                count = min(len(answer.data), answer.stream.window, self.window, frame_bytes)
                if count <= 0 and answer.data:
                    continue
                progress = True
                size += count
                self._take_from(answer, count, parts)
                del self._queued[answer.stream.id]
                if answer.data:
                    self._queued[answer.stream.id] = answer  # to the end of the queue
                else:
                    parts.append(answer.trailers)
                    completed.append(answer.stream)
        return b"".join(parts), completed

    def _take_from(self, answer: QueuedAnswer, size: int, parts: list[bytes]) -> None:
        stream = answer.stream
        parts += (FRAME_HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream.id), bytes(answer.data[:size]))
        answer.data = answer.data[size:]
        self._progress_at = answer.progress_at = time.monotonic()
        stream.window -= size
        self.window -= size
        self.queued_bytes -= size

    def discard(self, stream: Stream) -> None:
        if (answer := self._queued.pop(stream.id, None)) is not None:
            self.queued_bytes -= len(answer.data)

    def stalled(self, now: float, *, paused: bool) -> list[Stream]:
        """Return the streams whose client opens no window; time does not count while the transport is `paused`."""
        stalled = []
        for answer in self._queued.values():
            if paused:
                answer.progress_at = now
            # A stream with a window of its own waits for its turn in the connection's window.
            since = max(answer.progress_at, self._progress_at) if answer.stream.window > 0 else answer.progress_at
            if now - since > WRITE_TIMEOUT_SECONDS:
                stalled.append(answer.stream)
        return stalled

    def apply_settings(self, payload: bytes, streams: Iterable[Stream]) -> None:
        for key, value in parse_settings(payload):
            if key == INITIAL_WINDOW_SIZE:
                change, self.initial_window = value - self.initial_window, value
                for stream in streams:
                    stream.window += change
                    if stream.window > MAX_WINDOW:
                        raise ConnectionFault(
                            ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE raises a window above {MAX_WINDOW}"
                        )
            elif key == MAX_FRAME_SIZE:
                self.frame_bytes = value

    def widen(self, size: int) -> None:
        if not size:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE must not be 0")
        self.window += size
        if self.window > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"the connection's window exceeds {MAX_WINDOW}")


def final_frames(stream: Stream, trailers: bytes) -> bytes:
    """Return the trailers; to a client that is still sending, add RST_STREAM with NO_ERROR (RFC 9113, 8.1)."""
    data = frame(HEADERS, END_HEADERS | END_STREAM, stream.id, trailers)
    return data if stream.complete else data + rst_stream(stream.id, ErrorCode.NO_ERROR)
