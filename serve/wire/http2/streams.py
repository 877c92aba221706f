"""The streams of one HTTP/2 connection (RFC 9113): frames in, answers out, without I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from serve.wire import connection_limits as limits
from serve.wire.http2 import frames
from serve.wire.http2.frames import ACK, DATA, END_STREAM, HEADERS, ConnectionFault, ErrorCode, Frame, StreamFault
from serve.wire.http2.headers import HeaderBlock, HeaderReader, validate_trailers
from serve.wire.http2.stream import SMALL_DATA_BYTES, SendQueue, Stream

_CONNECTION_WINDOW, _STREAM_WINDOW = 16 << 20, 4 << 20
_STREAM_BYTES = 4 << 10  # of memory that a call takes without its body
_USEFUL_WRITE_BYTES = 1 << 10
_PING_PAYLOAD = b"retiring"
SERVER_PREFACE = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: limits.MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: limits.MAX_HEAD_BYTES,
    }
) + frames.window_update(0, _CONNECTION_WINDOW - frames.DEFAULT_WINDOW)

# Of one connection before others have their turn, in the unit of limits.FloodGuard: a few milliseconds.
_TURN_COST = 2048
_REQUEST_COST = 32  # of a call with its answer
_CANCEL_COST = 8
_CANCELS_PER_TURN = _TURN_COST // _CANCEL_COST

Write = Callable[[bytes], Any]
OnError = Callable[[ErrorCode, str], None]


class Application(Protocol):
    """Answers requests: calls `streams.answer` once for each, at any time."""

    def parse_head(self, request: dict[bytes, bytes] | None) -> Any:
        """Return what becomes `stream.head`; it is reused for equal headers. None: the headers exceed the limit."""

    def on_headers(self, streams: Streams, stream: Stream) -> None:
        """Handle a new stream."""

    def on_data(self, streams: Streams, stream: Stream, size: int) -> None:
        """Handle `size` more bytes of the body, with more to come."""

    def on_complete(self, streams: Streams, stream: Stream) -> None:
        """Handle a complete request that was not answered yet: `stream.running` until it is answered."""

    def on_timeout(self, streams: Streams, stream: Stream) -> None:
        """Answer a request whose body did not arrive in time."""

    def on_cancel(self, stream: Stream) -> None:
        """Clean up after a stream that the client cancelled before it was complete."""


class Streams:
    """`on_error` is called for each stream error, `on_drained` when a draining connection has answered everything."""

    address = ""  # of the peer

    def __init__(
        self,
        app: Application,
        write: Write,
        on_error: OnError,
        on_drained: Callable[[], None],
        memory: limits.CallMemory | None = None,
    ) -> None:
        self._app, self._write, self._on_error, self._on_drained = app, write, on_error, on_drained
        self._memory = limits.CallMemory() if memory is None else memory
        self.reader, self.send_queue = frames.FrameReader(), SendQueue(self._memory)
        self._frames: Iterator[Frame] | None = None  # received, and left for a later turn
        self._later = bytearray()  # received after those
        self._turn_cost = 0
        self._headers, self._flood_guard = HeaderReader(app.parse_head, self._pay_for_decoding), limits.FloodGuard()
        self._has_settings = False  # the client's first SETTINGS arrived
        self.paused = False  # the transport's buffer is full
        self.open: dict[int, Stream] = {}
        self._answered_early: deque[int] = deque(maxlen=64)  # answered while the client was still sending
        self._skipped: deque[range] = deque(maxlen=64)  # stream ids that the client passed over
        self.last_id = 0
        self.running = 0  # calls that wait for the application and not for their client
        self.received_bytes = 0  # of bodies
        self._unacknowledged = 0  # received bytes that no WINDOW_UPDATE for the connection has returned yet
        self._draining = self.refusing = self.closed = False
        self._closing: list[Stream] = []  # to be cancelled after the end

    @property
    def is_awaiting_client(self) -> bool:
        """The client has not finished its preface or a header block."""
        return not self._has_settings or self._headers.is_open

    @property
    def waiting_since(self) -> float:
        """When the oldest call began that waits for its client; infinity if none does."""
        return next((stream.opened_at for stream in self.open.values() if not stream.running), math.inf)

    def receive(self, data: bytes = b"") -> bool:
        """Handle received bytes, up to the cost of a turn. Return True if some are left, for which to call it again.

        Raises ConnectionFault where the connection has to end.
        """
        received = self._frames
        if received is None:
            received = self.reader.feed(data)
        elif data:
            self._later += data
        self._turn_cost = 0
        for kind, flags, stream_id, payload in received:
            if self._headers.is_open and kind != frames.CONTINUATION:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
            try:
                if kind == DATA and self._has_settings:
                    self._handle_data(flags, stream_id, payload)
                elif kind == HEADERS and self._has_settings:
                    self._handle_block(self._headers.add_headers(stream_id, flags, payload))
                else:
                    self._handle_other(kind, flags, stream_id, payload)
            except StreamFault as fault:
                self._reset(stream_id, fault.code, str(fault))
            self._turn_cost += 1
            if self._turn_cost >= _TURN_COST or self.closed:
                self._frames = received
                return True
        self._frames = None
        if self._later:
            self._frames = self.reader.feed(bytes(self._later))
            self._later.clear()
            return True
        return False

    # Called by the application

    def answer(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> None:
        """Send the answer. Without a head it consists of the trailers."""
        self.wait_for_client(stream)
        if stream.cancelled:
            self._forget(stream)
            return
        stream.sending = True
        data, complete = self.send_queue.add(stream, head, body, trailers, paused=self.paused)
        self._write(data)
        if complete:
            self._finish(stream)
        else:
            self.send_queued()
            self._memory.fits()

    def send_part(self, stream: Stream, head: bytes, data: bytes) -> bool:
        """Send a part of an answer that goes on; return False where the client's windows have no room for it."""
        if (part := self.send_queue.add_part(stream, head, data)) is None:
            return False
        self._write(part)
        return True

    def wait_for_client(self, stream: Stream) -> None:
        """Note that the application has nothing to compute: it has answered, or goes on when the client does."""
        if stream.running:
            stream.running = False
            self.running -= 1

    # Called by the connection

    def send_queued(self) -> None:
        small_frames = self.send_queue.small_frames
        while self.send_queue.has_queued and not (self.closed or self.paused):
            data, completed = self.send_queue.take()
            if not data:
                break
            self._write(data)
            if len(data) >= _USEFUL_WRITE_BYTES:
                self._flood_guard.credit()
            for stream in completed:
                self._finish(stream)
        # Not the place to raise a fault: the next control frame does.
        self._flood_guard.charge(self.send_queue.small_frames - small_frames)

    def start_draining(self) -> None:
        """Announce the end with GOAWAY; requests sent before the client reads it are still answered."""
        self._draining = True
        goaway = frames.goaway(frames.MAX_WINDOW, ErrorCode.NO_ERROR)
        self._write(goaway + frames.frame(frames.PING, 0, 0, _PING_PAYLOAD))

    def refuse_new_streams(self) -> None:
        """Finish draining: the client has seen GOAWAY, or had time to."""
        if not self.refusing:
            self.refusing = True
            self._write(frames.goaway(self.last_id, ErrorCode.NO_ERROR))
            if not self.open:
                self._on_drained()

    def check_timeouts(self, now: float) -> None:
        for stream in self.send_queue.stalled(now, paused=self.paused):
            self._reset(stream.id, ErrorCode.CANCEL, "the client opens no window for the answer")
        due = []
        for stream in self.open.values():
            if now - stream.opened_at <= limits.BODY_TIMEOUT_SECONDS:
                break  # so are all that follow
            if not (stream.complete or stream.sending or stream.cancelled):
                due.append(stream)
                if len(due) == _CANCELS_PER_TURN:  # the next check takes the rest
                    break
        for stream in due:
            self._app.on_timeout(self, stream)

    def close(self) -> bool:
        """Cancel streams: the client has disconnected, or is being disconnected. Return True if some are left.

        It is to be called again for those in a later turn: a connection may have many, and others wait.
        """
        if not self.closed:
            self.closed = True
            self._closing = list(self.open.values())
            for stream in self._closing:
                stream.cancelled = True  # so that none is computed any more
        for stream in self._closing[-_CANCELS_PER_TURN:]:
            if stream.id in self.open:
                self._cancel(stream)
        del self._closing[-_CANCELS_PER_TURN:]
        return bool(self._closing)

    # Frames

    def _handle_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self.received_bytes += size
        # The window is returned as data is read; the application bounds how much of the bodies is kept.
        self._unacknowledged += size
        if self._unacknowledged > _CONNECTION_WINDOW // 2:
            self._write(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        stream = self.open.get(stream_id)
        if stream is None or stream.complete or stream.cancelled or stream.sending:
            self._handle_late_data(stream, stream_id, size)
            return
        payload = frames.strip_padding(flags, payload)
        if payload:
            stream.parts.append(payload)
            stream.size += len(payload)
        if flags & END_STREAM:
            self._complete(stream)
            return
        if size < SMALL_DATA_BYTES:
            self._charge()
        stream.unacknowledged += size
        if stream.unacknowledged > _STREAM_WINDOW // 2:
            self._write(frames.window_update(stream_id, stream.unacknowledged))
            stream.unacknowledged = 0
        self._app.on_data(self, stream, len(payload))

    def _handle_late_data(self, stream: Stream | None, stream_id: int, size: int) -> None:
        """Ignore DATA of a closed stream if the client could not know yet that it is closed."""
        self._check_opened(stream_id, "DATA")
        if size < SMALL_DATA_BYTES:
            self._charge()
        ended = stream_id not in self._answered_early and stream_id <= self.last_id
        if ended if stream is None else stream.complete:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")

    def _handle_block(self, header_block: HeaderBlock | None) -> None:
        if header_block is None:
            return
        stream_id, flags, block = header_block
        if stream_id <= self.last_id:
            self._handle_trailers(stream_id, flags, block)
            return
        if not self.refusing:
            if stream_id > self.last_id + 2:
                self._skipped.append(range(self.last_id + 1, stream_id))
            self.last_id = stream_id
        head, content_length = self._headers.decode_request(block)
        if self.refusing:  # GOAWAY excluded this stream
            return
        if len(self.open) >= limits.MAX_STREAMS or self.send_queue.queued_bytes > limits.MAX_QUEUED_BYTES:
            raise StreamFault(ErrorCode.REFUSED_STREAM, "too many streams are open")
        memory = self._memory
        if memory.held_bytes > memory.limit and not memory.fits():
            raise StreamFault(ErrorCode.REFUSED_STREAM, "the calls of all clients take too much memory")
        if self.closed:  # to free memory
            return
        memory.held_bytes += _STREAM_BYTES
        self._turn_cost += _REQUEST_COST
        stream = self.open[stream_id] = Stream(stream_id, head, content_length)
        stream.complete = bool(flags & END_STREAM)
        self._app.on_headers(self, stream)
        if stream.complete:
            self._complete(stream)

    def _handle_trailers(self, stream_id: int, flags: int, block: bytes) -> None:
        """Validate trailers of a request. gRPC clients send none."""
        self._charge()
        fields = self._headers.decode_trailers(block)
        stream = self.open.get(stream_id)
        if stream is None:
            if stream_id not in self._answered_early:
                is_new = any(stream_id in skipped for skipped in self._skipped)
                code = ErrorCode.PROTOCOL_ERROR if is_new else ErrorCode.STREAM_CLOSED
                raise ConnectionFault(code, "HEADERS on a closed stream, or one with an id lower than the last")
        elif stream.complete:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        elif not stream.cancelled and not stream.sending:
            if not flags & END_STREAM:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers must end the stream")
            validate_trailers(fields)
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        stream.complete = True
        if stream.id not in self.open or stream.sending:  # it was answered early
            return
        if stream.content_length is not None and stream.content_length != stream.size:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "the length of the body differs from content-length")
        stream.running = True
        self.running += 1
        self._app.on_complete(self, stream)

    def _handle_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._has_settings and (kind != frames.SETTINGS or flags & ACK):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        if kind == frames.CONTINUATION:
            self._charge()
            self._handle_block(self._headers.add_continuation(stream_id, flags, payload))
            return
        self._charge()
        frames.validate_frame(kind, flags, stream_id, payload)
        if (handle := _HANDLERS.get(kind)) is not None:  # other types are ignored, as the standard requires
            handle(self, flags, stream_id, payload)

    def _handle_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        size = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not stream_id:
            self.send_queue.widen(size)
        else:
            self._check_opened(stream_id, "WINDOW_UPDATE")
            if (stream := self.open.get(stream_id)) is None:
                return
            self.send_queue.widen_stream(stream, size)
        self.send_queued()

    def _handle_rst_stream(self, _flags: int, stream_id: int, _payload: bytes) -> None:
        self._check_opened(stream_id, "RST_STREAM")
        if (stream := self.open.get(stream_id)) is not None:
            self._charge()  # twice as much as a frame: the request may have been computed
            self._cancel(stream)

    def _handle_ping(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._write(frames.frame(frames.PING, ACK, 0, payload))
        elif self._draining and payload == _PING_PAYLOAD:
            self.refuse_new_streams()

    def _handle_settings(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if flags & ACK:
            return
        self._charge(self.send_queue.apply_settings(payload, self.open.values()))
        self._has_settings = True
        self._write(frames.frame(frames.SETTINGS, ACK, 0))
        self.send_queued()

    # The end of a stream

    def _finish(self, stream: Stream) -> None:
        if not stream.complete:
            self._answered_early.append(stream.id)
        self._flood_guard.credit()
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if self.open.pop(stream.id, None) is not None:
            self._memory.held_bytes -= _STREAM_BYTES
        if self.refusing and not self.open and not self.closed:
            self._on_drained()

    def _cancel(self, stream: Stream) -> None:
        """Cancel a stream. A running one stays open until it is answered, so that cancelling cannot evade the limit."""
        stream.cancelled = True
        self._turn_cost += _CANCEL_COST
        self.send_queue.discard(stream)
        if stream.running:
            return
        self._forget(stream)
        if not stream.sending:
            self._app.on_cancel(stream)

    def _reset(self, stream_id: int, code: ErrorCode, text: str) -> None:
        self._charge()
        self._turn_cost += _CANCEL_COST
        self._on_error(code, text)
        self._write(frames.rst_stream(stream_id, code))
        if (stream := self.open.get(stream_id)) is not None:
            if not stream.complete:
                self._answered_early.append(stream_id)
            self._cancel(stream)
        elif stream_id == self.last_id:  # refused before it was opened
            self._answered_early.append(stream_id)

    def _pay_for_decoding(self, fields: int, size: int) -> None:
        self._turn_cost += fields + size // limits.ENCODED_BYTES_PER_COST
        if fields >= limits.FIELDS_PER_COST:
            self._charge(fields // limits.FIELDS_PER_COST)

    def _charge(self, cost: int = 1) -> None:
        if not self._flood_guard.charge(cost):
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many control frames or cancelled requests")

    def _check_opened(self, stream_id: int, name: str) -> None:
        if not stream_id & 1 or (stream_id > self.last_id and not self.refusing):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{name} on a stream that was not opened")


_HANDLERS = {
    frames.WINDOW_UPDATE: Streams._handle_window_update,
    frames.RST_STREAM: Streams._handle_rst_stream,
    frames.PING: Streams._handle_ping,
    frames.SETTINGS: Streams._handle_settings,
}
