"""The requests of one HTTP/2 connection (RFC 9113), many at a time: frames in, answers out, and no I/O of its own.

One request of an HTTP/2 connection and its answer, and who answers.

Frames that cost a client nothing and us a little: a connection that is useful may send many, others may not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from serve.grpc.http2 import frames
from serve.grpc.http2.frames import ACK, DATA, END_STREAM, HEADERS, Code, ConnectionFault, StreamFault
from serve.grpc.http2.headers import MOST_LIST_BYTES, Heads, Whole, check_trailers
from serve.grpc.http2.hpack import HpackError
from serve.grpc.http2.send_queue import Outbox
from serve.grpc.http2.stream import Application, Stream

BODY_SECONDS = 60.0  # for a request, from its first byte to its last
MOST_STREAMS = 2048
_WINDOW, _STREAM_WINDOW = 16 << 20, 4 << 20  # what a client may send before it hears from us again
_DEAR_BYTES = 1 << 10  # a longer head costs us something, and a shorter piece of an answer is worth nothing
_SMALL_BYTES = 256  # a piece of a body that is smaller serves nobody
_HELD_BYTES = 64 << 20  # of answers that the client makes no room for
_PING = b"retiring"
HELLO = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
        frames.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: MOST_LIST_BYTES,
    }
) + frames.window_update(0, _WINDOW - frames.FIRST_WINDOW)

Write = Callable[[bytes], Any]
Refused = Callable[[Code, str], None]


class Streams:
    """`settled` is called when nothing is asked any more and all is answered."""

    def __init__(self, app: Application, write: Write, refused: Refused, settled: Callable[[], None]) -> None:
        self._app, self._write, self._refused, self._settled = app, write, refused, settled
        self.cutter, self.outbox = frames.Cutter(), Outbox()
        self._heads, self._goodwill = Heads(app.understand), Goodwill()
        self._agreed = self.paused = False  # the client's first settings are here; the transport takes no more for now
        self.open: dict[int, Stream] = {}
        self._left: deque[int] = deque(maxlen=64)  # streams that were answered while the client was still sending
        self.last = 0
        self._received = 0  # bytes that the connection's window was not topped up for
        self._retiring = self.retired = self.closed = False

    @property
    def beginning(self) -> bool:
        """The client owes the rest of what it began: its greeting, or a head."""
        return not self._agreed or self._heads.open

    def receive(self, data: bytes) -> None:
        """Raises ConnectionFault where the connection has to end."""
        for kind, flags, stream_id, payload in self.cutter.feed(data):
            if self._heads.open and kind != frames.CONTINUATION:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a head is interrupted by another frame")
            try:
                if kind == DATA and self._agreed:
                    self._data(flags, stream_id, payload)
                elif kind == HEADERS and self._agreed:
                    self._head(self._heads.begin(stream_id, flags, payload))
                else:
                    self._other(kind, flags, stream_id, payload)
            except StreamFault as fault:
                self._reset(stream_id, fault.code, str(fault))
            except HpackError as error:
                raise ConnectionFault(Code.COMPRESSION_ERROR, str(error)) from None

    # What the application asks for

    def answer(self, stream: Stream, head: bytes, body: bytes, trailers: bytes) -> None:
        """Without a head, the trailers are all of it."""
        stream.running = False
        if stream.gone:
            self._forget(stream)
            return
        stream.sending = True
        data, whole = self.outbox.answer(stream, head, body, trailers)
        self._write(data)
        if whole:
            self._answered(stream)
        else:
            self.send_rests()

    # What the connection asks for

    def send_rests(self) -> None:
        while self.outbox.waits and not (self.closed or self.paused):
            data, done = self.outbox.take()
            if not data:
                return
            self._write(data)
            self._goodwill.earn(len(data) >= _DEAR_BYTES)
            for stream in done:
                self._answered(stream)

    def retire(self) -> None:
        """Ask for no new streams; those that cross this word on its way are still taken."""
        self._retiring = True
        self._write(frames.goaway(frames.MOST_WINDOW, Code.NO_ERROR) + frames.frame(frames.PING, 0, 0, _PING))

    def settle(self) -> None:
        """The client has heard it: what is here now is all there will be."""
        if not self.retired:
            self.retired = True
            self._write(frames.goaway(self.last, Code.NO_ERROR))
            if not self.open:
                self._settled()

    def sweep(self, now: float) -> None:
        """Give up on what does not come and what is not taken."""
        for stream in self.outbox.stuck(now, paused=self.paused):
            self._reset(stream.id, Code.CANCEL, "the client makes no room for its answer")
        for stream in tuple(self.open.values()):
            if not (stream.complete or stream.sending or stream.gone) and now - stream.since > BODY_SECONDS:
                self._app.late(self, stream)

    def close(self) -> None:
        """The client is gone, or has to go."""
        self.closed = True
        for stream in tuple(self.open.values()):
            self._lose(stream)

    # Frames

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        # Topped up as it is read, a window is never overdrawn; what is kept of a body is bounded by who answers.
        self._received += size
        if self._received > _WINDOW // 2:
            self._write(frames.window_update(0, self._received))
            self._received = 0
        stream = self.open.get(stream_id)
        if stream is None or stream.complete or stream.gone or stream.sending:
            self._late_data(stream, stream_id, size)
            return
        payload = frames.unpadded(flags, payload)
        if payload:
            stream.parts.append(payload)
            stream.size += len(payload)
        if flags & END_STREAM:
            self._complete(stream)
            return
        if size < _SMALL_BYTES:
            self._spend()
        stream.received += size
        if stream.received > _STREAM_WINDOW // 2:
            self._write(frames.window_update(stream_id, stream.received))
            stream.received = 0
        self._app.grew(self, stream, len(payload))

    def _late_data(self, stream: Stream | None, stream_id: int, size: int) -> None:
        """Fine where the client could not know yet that the stream is closed."""
        self._opened_before(stream_id, "DATA")
        if size < _SMALL_BYTES:
            self._spend()
        unknown = stream_id not in self._left and stream_id <= self.last
        if unknown if stream is None else stream.complete:
            raise StreamFault(Code.STREAM_CLOSED, "DATA of a stream that is closed")

    def _head(self, whole: Whole | None) -> None:
        if whole is None:
            return
        stream_id, flags, block = whole
        if stream_id <= self.last:
            self._trailers(stream_id, flags, block)
            return
        self.last = self.last if self.retired else stream_id
        if len(block) >= _DEAR_BYTES:
            self._spend(4 * len(block) // _DEAR_BYTES)
        about, length = self._heads.read(block)
        if self.retired:  # the client was told that it will not be answered
            return
        if len(self.open) >= MOST_STREAMS or self.outbox.held > _HELD_BYTES:
            raise StreamFault(Code.REFUSED_STREAM, "too many streams are open already")
        stream = self.open[stream_id] = Stream(stream_id, self.outbox.first_window, about, length)
        stream.complete = bool(flags & END_STREAM)
        self._app.opened(self, stream)
        if stream.complete:
            self._complete(stream)

    def _trailers(self, stream_id: int, flags: int, block: bytes) -> None:
        """Of a body; gRPC's clients have none to tell, others may."""
        self._spend()
        fields = self._heads.skip(block)
        stream = self.open.get(stream_id)
        if stream is None:
            if stream_id not in self._left:
                raise ConnectionFault(Code.STREAM_CLOSED, "HEADERS of a stream that is closed")
        elif stream.complete:
            raise StreamFault(Code.STREAM_CLOSED, "HEADERS behind the end of a stream")
        elif not stream.gone and not stream.sending:
            if not flags & END_STREAM:
                raise StreamFault(Code.PROTOCOL_ERROR, "a second head in one stream")
            check_trailers(fields)
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        stream.complete = True
        if stream.id not in self.open:  # it was answered before
            return
        if stream.length is not None and stream.length != stream.size:
            raise StreamFault(Code.PROTOCOL_ERROR, "the body is not as long as its content-length says")
        self._app.complete(self, stream)

    def _other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._agreed and (kind != frames.SETTINGS or flags & ACK):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a connection begins with SETTINGS")
        if kind == frames.CONTINUATION:
            self._head(self._heads.go_on(stream_id, flags, payload))
            return
        self._spend()
        frames.check(kind, flags, stream_id, payload)
        if (act := _ACTS.get(kind)) is not None:  # all else may come, and means nothing to us
            act(self, flags, stream_id, payload)

    def _widen(self, _flags: int, stream_id: int, payload: bytes) -> None:
        size = int.from_bytes(payload, "big") & frames.MOST_WINDOW
        if not stream_id:
            self.outbox.widen(size)
        else:
            self._opened_before(stream_id, "WINDOW_UPDATE")
            if (stream := self.open.get(stream_id)) is None:
                return
            stream.widen(size)
        self.send_rests()

    def _taken_back(self, _flags: int, stream_id: int, _payload: bytes) -> None:
        self._opened_before(stream_id, "RST_STREAM")
        if (stream := self.open.get(stream_id)) is not None:
            self._lose(stream)

    def _ping(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if not flags & ACK:
            self._write(frames.frame(frames.PING, ACK, 0, payload))
        elif self._retiring and payload == _PING:
            self.settle()

    def _settings(self, flags: int, _stream_id: int, payload: bytes) -> None:
        if flags & ACK:
            return
        self.outbox.agree(payload, self.open.values())
        self._agreed = True
        self._write(frames.frame(frames.SETTINGS, ACK, 0))
        self.send_rests()

    # Ends of streams

    def _answered(self, stream: Stream) -> None:
        if not stream.complete:
            self._left.append(stream.id)
        self._goodwill.earn()
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self.open.pop(stream.id, None)
        if self.retired and not self.open and not self.closed:
            self._settled()

    def _lose(self, stream: Stream) -> None:
        """Nobody wants the answer. One that is being made still counts: else a client could ask for any number."""
        stream.gone = True
        self.outbox.drop(stream)
        if stream.running:
            return
        self._forget(stream)
        if not stream.sending:
            self._app.lost(stream)

    def _reset(self, stream_id: int, code: Code, text: str) -> None:
        self._spend()
        self._refused(code, text)
        self._write(frames.reset(stream_id, code))
        if (stream := self.open.get(stream_id)) is not None:
            if not stream.complete:
                self._left.append(stream_id)
            self._lose(stream)
        elif stream_id == self.last:  # refused before it was opened
            self._left.append(stream_id)

    def _spend(self, cost: int = 1) -> None:
        if not self._goodwill.spend(cost):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that serve nothing, or too many taken back")

    def _opened_before(self, stream_id: int, name: str) -> None:
        if not stream_id & 1 or (stream_id > self.last and not self.retired):
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"{name} of a stream that was not opened")


_ACTS = {
    frames.WINDOW_UPDATE: Streams._widen,
    frames.RST_STREAM: Streams._taken_back,
    frames.PING: Streams._ping,
    frames.SETTINGS: Streams._settings,
}


_MOST = 2000
_PER_SECOND = 500
_EARNED = 8  # for each answer: a call goes along with a few of them


class Goodwill:
    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        self._left, self._since = _MOST, time.monotonic()

    def spend(self, cost: int) -> bool:
        """For one such frame, or as many; False where it is used up."""
        self._left -= cost
        if self._left < 0:
            now = time.monotonic()
            self._left += min(_MOST, int((now - self._since) * _PER_SECOND))
            self._since = now
        return self._left >= 0

    def earn(self, worth: bool = True) -> None:
        if worth and self._left < _MOST:
            self._left += _EARNED
