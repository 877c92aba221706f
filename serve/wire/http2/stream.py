"""One stream of an HTTP/2 connection, and the queue of answers that wait for the client's flow control windows."""

from __future__ import annotations

import heapq
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from serve.wire.connection_limits import WRITE_TIMEOUT_SECONDS, CallMemory
from serve.wire.http2.frames import (
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
        "window_offset",
    )

    def __init__(self, stream_id: int, head: Any, content_length: int | None) -> None:
        self.id = stream_id
        # Bytes the client will take, less INITIAL_WINDOW_SIZE: a change of that setting need not touch every stream.
        self.window_offset = 0
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


SMALL_DATA_BYTES = 256  # DATA frames below this size count as flood
_BATCH_BYTES = 1 << 20  # handed to the transport at once
_MAX_DATA_BYTES = 1 << 18  # of one frame, even if the client allows more: a larger one would delay other answers
_MAX_OUTDATED_TURNS = 64
_SETTINGS_PER_COST = 8  # so many settings, or streams examined, cost as much as a control frame


@dataclass(slots=True)
class QueuedAnswer:
    """The part of an answer that was not sent yet."""

    stream: Stream
    data: memoryview
    trailers: bytes
    queued_at: float
    progress_at: float  # when the client last took some of it
    turn: int = 0  # of its entry in the heap that counts


class SendQueue:
    __slots__ = (
        "_last_turn",
        "_paused_at",
        "_progress_at",
        "_queued",
        "_turns",
        "_widest_offset",
        "frame_bytes",
        "initial_window",
        "memory",
        "queued_bytes",
        "small_frames",
        "taken_bytes",
        "window",
    )

    def __init__(self, memory: CallMemory) -> None:
        self.memory = memory
        self.window = self.initial_window = DEFAULT_WINDOW
        self.frame_bytes = MAX_FRAME_BYTES
        self.queued_bytes = self.taken_bytes = 0
        self.small_frames = 0  # sent so far because the client's windows are tiny
        self._queued: dict[int, QueuedAnswer] = {}  # the oldest first
        # A heap with the widest window first: so one look finds an answer that may be sent, or that there is none.
        # Answers that are not current, by their turn, are left in it until they come up.
        self._turns: list[tuple[int, int, QueuedAnswer]] = []
        self._last_turn = 0
        self._widest_offset = 0  # of all streams so far
        self._progress_at = 0.0  # when the client last took some of any answer
        self._paused_at = 0.0  # when the transport was last seen full

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def stream_window(self, stream: Stream) -> int:
        return self.initial_window + stream.window_offset

    def add(
        self, stream: Stream, head: bytes, body: bytes, trailers: bytes, *, paused: bool = False
    ) -> tuple[bytes, bool]:
        """Return the bytes to write now, and whether they are the whole answer. Without a head it is only trailers."""
        if not head:
            return final_frames(stream, trailers), True
        size, stream_id = len(body), stream.id
        if (
            size <= self.window
            and size <= self.initial_window + stream.window_offset
            and size <= self.frame_bytes
            and not paused
        ):
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
        now = time.monotonic()
        answer = QueuedAnswer(stream, memoryview(body), final_frames(stream, trailers), now, now)
        self._queued[stream_id] = answer
        self.queued_bytes += size
        self.memory.held_bytes += size
        self._push(answer)
        return frame(HEADERS, END_HEADERS, stream_id, head), False

    def add_part(self, stream: Stream, head: bytes, data: bytes) -> bytes | None:
        """Return the bytes of a part of an answer that goes on; None where the windows have no room for it."""
        if len(data) > min(self.window, self.stream_window(stream), self.frame_bytes):
            return None
        self.window -= len(data)
        stream.window_offset -= len(data)
        return (frame(HEADERS, END_HEADERS, stream.id, head) if head else b"") + frame(DATA, 0, stream.id, data)

    def take(self) -> tuple[bytes, list[Stream]]:
        """Return as many frames as the windows allow, widest stream first, and the streams that are complete."""
        parts: list[bytes] = []
        completed: list[Stream] = []
        size, frame_bytes = 0, min(self.frame_bytes, _MAX_DATA_BYTES)
        while self._turns and size < _BATCH_BYTES:
            _, turn, answer = self._turns[0]
            stream, left = answer.stream, len(answer.data)
            if turn != answer.turn:
                heapq.heappop(self._turns)
                continue
            count = min(left, self.initial_window + stream.window_offset, self.window, frame_bytes)
            if count <= 0 and left:
                break
            heapq.heappop(self._turns)
            count = max(count, 0)
            size += count
            self._take_from(answer, count, parts)
            if answer.data:
                self._push(answer)
                if count < SMALL_DATA_BYTES:
                    self.small_frames += 1
            else:
                del self._queued[stream.id]
                parts.append(answer.trailers)
                completed.append(stream)
        return b"".join(parts), completed

    def _push(self, answer: QueuedAnswer) -> None:
        """Enter an answer into the heap by its present window."""
        self._last_turn += 1
        answer.turn = self._last_turn
        heapq.heappush(self._turns, (-answer.stream.window_offset, answer.turn, answer))
        if len(self._turns) > 2 * len(self._queued) + _MAX_OUTDATED_TURNS:
            self._turns = [entry for entry in self._turns if entry[1] == entry[2].turn]
            heapq.heapify(self._turns)

    def _take_from(self, answer: QueuedAnswer, size: int, parts: list[bytes]) -> None:
        stream = answer.stream
        parts += (FRAME_HEADER.pack(size >> 8, size & 0xFF, DATA, 0, stream.id), bytes(answer.data[:size]))
        answer.data = answer.data[size:]
        self._progress_at = answer.progress_at = time.monotonic()
        stream.window_offset -= size
        self.window -= size
        self.taken_bytes += size
        self._release(size)

    def _release(self, size: int) -> None:
        self.queued_bytes -= size
        self.memory.held_bytes -= size

    def discard(self, stream: Stream) -> None:
        if (answer := self._queued.pop(stream.id, None)) is not None:
            self._release(len(answer.data))
            answer.turn, answer.data = 0, memoryview(b"")  # its entry in the heap must not keep the bytes

    def stalled(self, now: float, *, paused: bool) -> list[Stream]:
        """Return the streams whose client opens no window; time does not count while the transport is `paused`."""
        stalled: list[Stream] = []
        if paused:
            self._paused_at = now
            return stalled
        for answer in self._queued.values():
            if now - answer.queued_at <= WRITE_TIMEOUT_SECONDS:
                break  # so are all that follow
            # A stream with a window of its own waits for its turn in the connection's window.
            has_window = self.stream_window(answer.stream) > 0
            since = max(answer.progress_at, self._paused_at, self._progress_at if has_window else 0.0)
            if now - since > WRITE_TIMEOUT_SECONDS:
                stalled.append(answer.stream)
        return stalled

    def apply_settings(self, payload: bytes, streams: Collection[Stream]) -> int:
        """Apply settings, the last of equal ones; return the cost as a number of control frames."""
        settings = dict(parse_settings(payload))
        cost = len(settings) // _SETTINGS_PER_COST
        self.frame_bytes = settings.get(MAX_FRAME_SIZE, self.frame_bytes)
        self.initial_window = settings.get(INITIAL_WINDOW_SIZE, self.initial_window)
        if self.initial_window + self._widest_offset > MAX_WINDOW:  # of a stream that may be closed
            cost += len(streams) // _SETTINGS_PER_COST
            self._widest_offset = max((stream.window_offset for stream in streams), default=0)
            if self.initial_window + self._widest_offset > MAX_WINDOW:
                raise ConnectionFault(
                    ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE raises a window above {MAX_WINDOW}"
                )
        return cost

    def widen_stream(self, stream: Stream, size: int) -> None:
        if not size:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE must not be 0")
        stream.window_offset += size
        self._widest_offset = max(self._widest_offset, stream.window_offset)
        if self.stream_window(stream) > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, f"the stream's window exceeds {MAX_WINDOW}")
        if (answer := self._queued.get(stream.id)) is not None:
            self._push(answer)

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
