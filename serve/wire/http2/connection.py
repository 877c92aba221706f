"""One HTTP/2 connection as an asyncio protocol: timeouts, back-pressure and a graceful end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from serve.wire.connection_limits import HEAD_TIMEOUT_SECONDS, IDLE_SECONDS, LINGER_SECONDS, CallMemory, WriteTimeout
from serve.wire.http2.frames import ConnectionFault, ErrorCode, goaway
from serve.wire.http2.streams import SERVER_PREFACE, Application, Streams
from serve.wire.request import Log

_DRAIN_TIMEOUT_SECONDS = 1.0  # for the client to acknowledge GOAWAY
_UNUSED_LINGER_SECONDS = 0.3  # for a client without any request to close
_PROGRESS_BYTES = 1 << 10  # moved by calls, at least, to count as progress
_HTTP1_METHODS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")
_HTTP1_BODY = b'{"error":"this port serves gRPC over HTTP/2 only; use the HTTP port for HTTP/1.1"}'
_HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_HTTP1_BODY), _HTTP1_BODY)
)


@dataclass(frozen=True)
class Host:
    """What a connection needs of its listener."""

    app: Application
    log: Log
    memory: CallMemory
    admit: Callable[[Connection], str]  # returns why there is no room for a new connection; empty if there is
    leave: Callable[[Connection], bool]  # of a connection that ends; False where it must not wait for its client
    forget: Callable[[Connection], None]  # of one that is closed
    is_stopping: Callable[[], bool]


class Connection(asyncio.Protocol):
    transport: asyncio.Transport
    address = ""  # for the listener, which counts connections by it

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self.active_at = self._loop.time()  # when a call last began or moved on; updated by the checks of timeouts
        self._deadline = self.active_at + HEAD_TIMEOUT_SECONDS
        self._progress: tuple[int, int] = 0, 0  # of the calls, at the last check of timeouts
        self._write_timeout = WriteTimeout()
        self._buffered_bytes = 0  # of the transport, counted as memory of the calls while it is full
        self._draining = self._closing = False
        self._is_behind = False  # received frames are left for the next turn
        self._reads = True
        self._timer: asyncio.TimerHandle | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        host = self._host
        self._streams = Streams(host.app, self.transport.write, self._report, self._on_drained, host.memory)
        if refusal := host.admit(self):
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, refusal)
        elif host.is_stopping():
            self.drain()
        self._streams.address = self.address

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self._closing:
            self._closing = True
            self._host.leave(self)
            self._cancel_streams()
        self._host.forget(self)
        self._count_buffered(0)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        streams = self._streams
        before = streams.is_awaiting_client, streams.last_id
        try:
            is_new = not streams.reader.has_preface
            if is_new and not self._read_preface(data):
                return
            is_behind = streams.receive(b"" if is_new else data)
        except ConnectionFault as fault:
            if not streams.reader.has_preface and data.startswith(_HTTP1_METHODS):
                self._host.log.refused("h2_http1")
                self._close(_HTTP1_ANSWER)
            else:
                self._fail(fault.code, str(fault))
        except Exception:
            self._end_after_fault()
        else:
            if streams.is_awaiting_client and before != (True, streams.last_id):
                self._deadline = self._loop.time() + HEAD_TIMEOUT_SECONDS
            if is_behind and not self._is_behind and not self._closing:
                self._is_behind = True
                self._read_if_allowed()
                self._loop.call_soon(self._catch_up)

    def _catch_up(self) -> None:
        """Go on with frames that were received in an earlier turn; other connections had theirs meanwhile."""
        self._is_behind = False
        self.data_received(b"")
        if not self._closing:
            self._read_if_allowed()

    def _read_if_allowed(self) -> None:
        """Read unless received frames wait for their turn, or the client does not take its answers."""
        reads = not (self._is_behind or self._streams.paused)
        if reads != self._reads:
            self._reads = reads
            if reads:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def _read_preface(self, data: bytes) -> bool:
        """Send our preface only after the client's, since an HTTP/1.1 client is answered in HTTP/1.1."""
        if not self._streams.reader.read_preface(data):
            return False
        self.transport.write(SERVER_PREFACE)
        if self._draining:
            self._streams.start_draining()
        return True

    def pause_writing(self) -> None:
        """Stop reading: a client that does not read its answers may not send more requests."""
        self._streams.paused = True
        self._count_buffered(self.transport.get_write_buffer_size())
        if not self._closing:
            self._read_if_allowed()

    def resume_writing(self) -> None:
        self._count_buffered(0)
        self._streams.paused = False
        if self._closing or self.transport.is_closing():
            return
        self._read_if_allowed()
        try:
            self._streams.send_queued()
        except Exception:
            self._end_after_fault()

    def _count_buffered(self, size: int) -> None:
        self._host.memory.held_bytes += size - self._buffered_bytes
        self._buffered_bytes = size

    # Called by the listener

    def drain(self) -> None:
        """Announce the end, answer what the client sent before it knew, and close."""
        if self._draining or self._closing:
            return
        self._draining = True
        if self._streams.reader.has_preface:
            self._streams.start_draining()
        timeout = _UNUSED_LINGER_SECONDS if self._streams.is_awaiting_client else _DRAIN_TIMEOUT_SECONDS
        self._timer = self._loop.call_later(timeout, self._streams.refuse_new_streams)

    def check_timeouts(self, now: float) -> None:
        """Called about once a second, with the loop's time."""
        if self._write_timeout.is_over(self.transport, now):
            self.transport.abort()
        if self._closing:
            return
        streams = self._streams
        moved_bytes = streams.received_bytes + streams.send_queue.taken_bytes
        progress = streams.last_id, moved_bytes // _PROGRESS_BYTES
        if progress != self._progress:
            self._progress, self.active_at = progress, now
        if (streams.open or self.active_at == now) and not streams.is_awaiting_client:
            self._deadline = now + IDLE_SECONDS
        try:
            streams.check_timeouts(time.monotonic())
        except ConnectionFault as fault:
            self._fail(fault.code, str(fault))
            return
        except Exception:
            self._end_after_fault()
            return
        if now >= self._deadline:
            if streams.is_awaiting_client:
                self._fail(ErrorCode.ENHANCE_YOUR_CALM, "the request headers did not arrive in time")
            else:
                self.drain()

    # Called when another connection needs room or memory

    @property
    def idle_until(self) -> float | None:
        """When the connection may be closed, from its last progress; None while the application works for it."""
        return None if self._streams.running else self.active_at + IDLE_SECONDS

    @property
    def waiting_since(self) -> float:
        """When the oldest call began that waits for this client; infinity if none does."""
        return self._streams.waiting_since

    def give_way(self) -> None:
        if self._streams.open:
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, "its calls made no progress while others wait for room")
            if self._buffered_bytes:
                self.transport.abort()
        else:
            self._close(goaway(self._streams.last_id, ErrorCode.NO_ERROR))

    # The end

    def _on_drained(self) -> None:
        self._close(b"")

    def _fail(self, code: ErrorCode, text: str) -> None:
        if not self._closing:
            self._report(code, text)
            preface = b"" if self._streams.reader.has_preface else SERVER_PREFACE
            self._close(preface + goaway(self._streams.last_id, code, text))

    def _end_after_fault(self) -> None:
        """End the connection after a mistake of ours, so that its client knows which calls were not handled."""
        self._host.log.failed("connection failed")
        try:
            self._fail(ErrorCode.INTERNAL_ERROR, "internal error")
        except Exception:
            self.transport.abort()
            raise

    def _report(self, code: ErrorCode, text: str) -> None:
        self._host.log.refused(f"h2_{code.name.lower()}", reason=text, code=code.name)

    def _close(self, data: bytes) -> None:
        """Write, then keep reading for a while: closing with unread bytes resets the connection and loses answers."""
        if self._closing:
            return
        self._closing = True
        may_wait = self._host.leave(self)
        if data:
            self.transport.write(data)
        if not self._reads:
            self.transport.resume_reading()
        if self._timer is not None:
            self._timer.cancel()
        if may_wait:
            if self.transport.can_write_eof():
                self.transport.write_eof()
            timeout = LINGER_SECONDS if self._streams.last_id else _UNUSED_LINGER_SECONDS
            self._timer = self._loop.call_later(timeout, self.transport.close)
        else:
            self.transport.abort()
        self._cancel_streams()

    def _cancel_streams(self) -> None:
        """Cancel what is open, a part in each turn."""
        if self._streams.close():
            self._loop.call_soon(self._cancel_streams)
