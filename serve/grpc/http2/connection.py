"""One HTTP/2 connection as an asyncio protocol: timeouts, back-pressure and a graceful end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from serve.grpc.http2.frames import ConnectionFault, ErrorCode, goaway
from serve.grpc.http2.stream import WRITE_TIMEOUT_SECONDS
from serve.grpc.http2.streams import SERVER_PREFACE, Application, Streams

HEADERS_TIMEOUT_SECONDS = 10.0  # for the preface and for a header block, from the first byte to the last
IDLE_TIMEOUT_SECONDS = 300.0
_DRAIN_TIMEOUT_SECONDS = 1.0  # for the client to acknowledge GOAWAY
_CLOSE_TIMEOUT_SECONDS = 2.0  # for the client to read its answers and close
_UNUSED_CLOSE_TIMEOUT_SECONDS = 0.3  # the same without any request
_HTTP1_METHODS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")
_HTTP1_BODY = b'{"error":"this port serves gRPC over HTTP/2 only; use the HTTP port for HTTP/1.1"}'
_HTTP1_ANSWER = (
    b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_HTTP1_BODY), _HTTP1_BODY)
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """What a connection needs of its listener."""

    app: Application
    connections: set[Connection]  # all that are open
    make_room: Callable[[], bool]  # close idle connections above the limit; False where all are busy
    on_error: Callable[[str], None]  # called with the name of each error, for metrics
    is_stopping: Callable[[], bool]


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + HEADERS_TIMEOUT_SECONDS
        self._last_checked_id = -1  # the last stream at the last check of timeouts
        self._unsent_bytes, self._write_deadline = 0, 0.0
        self._draining = self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transport is not a subclass
        self._streams = Streams(self._host.app, self.transport.write, self._report, self._on_drained)
        if not self._host.make_room():
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, f"all {len(self._host.connections)} connections are in use")
        self._host.connections.add(self)
        if self._host.is_stopping():
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._closing = True
        self._host.connections.discard(self)
        self._streams.close()
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
            streams.receive(b"" if is_new else data)
        except ConnectionFault as fault:
            if not streams.reader.has_preface and data.startswith(_HTTP1_METHODS):
                self._host.on_error("h2_http1")
                self._close(_HTTP1_ANSWER)
            else:
                self._fail(fault.code, str(fault))
        else:
            if streams.is_awaiting_client and before != (True, streams.last_id):
                self._deadline = self._loop.time() + HEADERS_TIMEOUT_SECONDS

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
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._streams.paused = False
            self.transport.resume_reading()
            self._streams.send_queued()

    # Called by the listener

    def drain(self) -> None:
        """Announce the end, answer what the client sent before it knew, and close."""
        if self._draining or self._closing:
            return
        self._draining = True
        if self._streams.reader.has_preface:
            self._streams.start_draining()
        timeout = _UNUSED_CLOSE_TIMEOUT_SECONDS if self._streams.is_awaiting_client else _DRAIN_TIMEOUT_SECONDS
        self._timer = self._loop.call_later(timeout, self._streams.refuse_new_streams)

    def check_timeouts(self, now: float) -> None:
        """Called about once a second, with the loop's time."""
        if self._is_write_stalled(now):
            self.transport.abort()
        if self._closing:
            return
        streams = self._streams
        if streams.open or streams.last_id != self._last_checked_id:
            self._last_checked_id = streams.last_id
            if not streams.is_awaiting_client:
                self._deadline = now + IDLE_TIMEOUT_SECONDS
        try:
            streams.check_timeouts(time.monotonic())
        except ConnectionFault as fault:
            self._fail(fault.code, str(fault))
            return
        if now >= self._deadline:
            if streams.is_awaiting_client:
                self._fail(ErrorCode.ENHANCE_YOUR_CALM, "the request headers did not arrive in time")
            else:
                self.drain()

    def _is_write_stalled(self, now: float) -> bool:
        """Return whether the client has read nothing for too long."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent_bytes
        self._unsent_bytes = unsent
        if unsent and unsent >= before and before:
            return now >= self._write_deadline
        self._write_deadline = now + WRITE_TIMEOUT_SECONDS
        return False

    # Called when another connection needs room

    @property
    def idle_until(self) -> float | None:
        """When the connection would be closed as idle; None while it has a request."""
        return None if self._streams.open else self._deadline

    def give_way(self) -> None:
        self._close(goaway(self._streams.last_id, ErrorCode.NO_ERROR))
        self._host.connections.discard(self)

    # The end

    def _on_drained(self) -> None:
        self._close(b"")

    def _fail(self, code: ErrorCode, text: str) -> None:
        if not self._closing:
            self._report(code, text)
            preface = b"" if self._streams.reader.has_preface else SERVER_PREFACE
            self._close(preface + goaway(self._streams.last_id, code, text))

    def _report(self, code: ErrorCode, text: str) -> None:
        log.info("refused", extra={"fields": {"reason": text, "code": code.name}})
        self._host.on_error(f"h2_{code.name.lower()}")

    def _close(self, data: bytes) -> None:
        """Write, then keep reading for a while: closing with unread bytes resets the connection and loses answers."""
        if self._closing:
            return
        self._closing = True
        self._streams.close()
        if data:
            self.transport.write(data)
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        timeout = _CLOSE_TIMEOUT_SECONDS if self._streams.last_id else _UNUSED_CLOSE_TIMEOUT_SECONDS
        self._timer = self._loop.call_later(timeout, self.transport.close)
