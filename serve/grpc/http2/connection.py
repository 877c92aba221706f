"""The transport of an HTTP/2 connection: how long a client may take, how many there may be, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from serve.grpc.http2.frames import Code, ConnectionFault, goaway
from serve.grpc.http2.stream import Application
from serve.grpc.http2.streams import HELLO, Streams
from serve.http1.exchange import plain
from serve.http1.limits import Outflow, make_room
from serve.logs import told

HEAD_SECONDS = 10.0  # for the greeting and for a head, from the first byte to the last
IDLE_SECONDS = 300.0  # a connection stays without a request
_ACK_SECONDS = 1.0  # for the client to hear that the connection ends
_GOODBYE_SECONDS = 2.0  # to read its answers and close it
_SILENT_SECONDS = 0.3  # where there never were any
_METHODS = (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC")  # as HTTP/1.1 begins

log = logging.getLogger(__name__)


class Connection(asyncio.Protocol):
    """`seats` are all of its kind, and `most` of them there may be."""

    transport: asyncio.Transport

    def __init__(
        self,
        app: Application,
        seats: set[Connection],
        most: int,
        refused: Callable[[str], None],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._seats, self._most, self._refused, self._stopping = app, seats, most, refused, stopping
        self._loop = asyncio.get_running_loop()
        self._outflow = Outflow()
        self._due = self._loop.time() + HEAD_SECONDS
        self._seen = -1  # the last stream there was, at the last look
        self._retiring = self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    # What the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class, only by what it does
        self._streams = Streams(self._app, self.transport.write, self._tell, self._settled)
        if not make_room(self._seats, self._most):
            self._end(Code.ENHANCE_YOUR_CALM, f"{len(self._seats)} connections are being served already")
        self._seats.add(self)
        if self._stopping():
            self.retire()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._closing = True
        self._seats.discard(self)
        self._streams.close()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        streams = self._streams
        before = streams.beginning, streams.last
        try:
            fresh = not streams.cutter.greeted
            if fresh and not self._greet(data):
                return
            streams.receive(b"" if fresh else data)
        except ConnectionFault as fault:
            if not streams.cutter.greeted and data.startswith(_METHODS):
                self._refused("h2_http1")
                text = "this port speaks gRPC, which is HTTP/2; HTTP/1.1 is spoken on the other one"
                self._goodbye(plain(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, text, b""))
            else:
                self._end(fault.code, str(fault))
        else:
            if streams.beginning and before != (True, streams.last):
                self._due = self._loop.time() + HEAD_SECONDS

    def _greet(self, data: bytes) -> bool:
        """Back, and not first: a client of an older HTTP is to be answered in its own words."""
        if not self._streams.cutter.greet(data):
            return False
        self.transport.write(HELLO)
        if self._retiring:
            self._streams.retire()
        return True

    def pause_writing(self) -> None:
        """Who does not take answers asks nothing more meanwhile."""
        self._streams.paused = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._streams.paused = False
            self.transport.resume_reading()
            self._streams.send_rests()

    # What the listener asks for

    def retire(self) -> None:
        """Say that the connection ends, answer what was asked before the client heard it, and close."""
        if self._retiring or self._closing:
            return
        self._retiring = True
        if self._streams.cutter.greeted:
            self._streams.retire()
        patience = _SILENT_SECONDS if self._streams.beginning else _ACK_SECONDS
        self._timer = self._loop.call_later(patience, self._streams.settle)

    def sweep(self, now: float) -> None:
        """Called now and then, with the loop's clock."""
        if self._outflow.stuck(self.transport, now):
            self.transport.abort()
        if self._closing:
            return
        streams = self._streams
        if streams.open or streams.last != self._seen:
            self._seen = streams.last
            if not streams.beginning:
                self._due = now + IDLE_SECONDS
        try:
            streams.sweep(time.monotonic())
        except ConnectionFault as fault:
            self._end(fault.code, str(fault))
            return
        if now >= self._due:
            if streams.beginning:
                self._end(Code.ENHANCE_YOUR_CALM, "the head did not arrive whole in time")
            else:
                self.retire()

    # What another connection asks for

    @property
    def idle_until(self) -> float | None:
        return None if self._streams.open else self._due

    def give_way(self) -> None:
        self._goodbye(goaway(self._streams.last, Code.NO_ERROR))
        self._seats.discard(self)

    def _settled(self) -> None:
        """Nothing is asked any more, and all is answered."""
        self._goodbye(b"")

    def _end(self, code: Code, text: str) -> None:
        if not self._closing:
            self._tell(code, text)
            hello = b"" if self._streams.cutter.greeted else HELLO
            self._goodbye(hello + goaway(self._streams.last, code, text))

    def _tell(self, code: Code, text: str) -> None:
        log.info("refused", extra=told(reason=text, code=code.name))
        self._refused(f"h2_{code.name.lower()}")

    def _goodbye(self, word: bytes) -> None:
        """And listen for a while: closing on unread bytes resets the connection, and loses what is still on its way."""
        if self._closing:
            return
        self._closing = True
        self._streams.close()
        if word:
            self.transport.write(word)
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        patience = _GOODBYE_SECONDS if self._streams.last else _SILENT_SECONDS
        self._timer = self._loop.call_later(patience, self.transport.close)
