"""HTTP/1.1 connections: parse requests in order and within limits, and write each response in one piece.

A connection needs no timer, no event and no second copy of the headers. An application gets each request as a
`Request`, or as its own subclass of it. It sees the head first: it answers at once, or returns the coroutine that will.
Below are, in this order: the application's side, the request, the connection, the rules for a head, and the
bytes of responses.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast

import httptools
import orjson

from serve.wire.connection_limits import (
    BODY_TIMEOUT_SECONDS,
    HEAD_TIMEOUT_SECONDS,
    KEEP_ALIVE_SECONDS,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    UNSENT_HIGH_WATER_BYTES,
    BufferLimit,
    PeerLimits,
    WriteBackpressure,
    WriteTimeout,
    make_room,
    peer_address,
)
from serve.wire.request import Disconnected, IncomingRequest, Log, request_id

_PROBE_SECONDS = 0.02  # after a client half-closed; most requests are answered by then
_HIGH_WATER_BYTES = 256 << 10  # of a body are handed over at once; below it the application is not woken
_SMALL_PIECE_BYTES = 1 << 10  # of a body, up to which pieces are joined as they come

SLICE_BYTES = 8 << 10  # that are parsed at once, but for a body of stated length
_CHUNKED_SLICE_BYTES = 16 << 10  # the same of a chunked body
_NEXT_HEAD_BYTES = 512  # behind a head, in which to look for the end of the next one
_REQUESTS_PER_TURN = 16  # of one connection begun in one turn of the event loop; more need another
_COST_PER_TURN = 16 << 10  # of parsing for one connection, about in bytes of heads
_SLICE_COST = 256  # of parsing a slice, whatever is in it
_PIECE_COST = 4  # of each piece of a body
_REQUEST_BYTES = 2 << 10  # of memory for a parsed request

Header = tuple[bytes, bytes]


R = TypeVar("R", bound="Request")


class Application(Protocol[R]):
    request_class: type[R]

    def begin(self, request: R) -> Coroutine[Any, Any, None] | None:
        """Decide by its head alone what becomes of a request, as soon as its turn has come.

        Return the coroutine that answers it, or None if it has been answered at once.
        """


class Request(IncomingRequest):
    """One request of a connection, and its response."""

    keep_alive = True  # the connection goes on after this request
    answering: asyncio.Task[None] | None = None
    gone = False  # the client disconnected
    half_closed = False  # the client sends no more; it may be gone, or still listen
    started = answered = False  # a response has been begun, or written completely
    body_bytes = _taken_bytes = 0  # of the body that have arrived, and that the application has taken
    _more = True  # of the body is to come
    _small_pieces: bytearray | None = None  # the last piece of the body, if it grows
    _waiter: asyncio.Future[None] | None = None
    _unsent_head = b""  # of a stream, written together with its first part

    def __init__(
        self,
        connection: Connection,
        method: str,
        target: tuple[str, bytes],
        headers: Mapping[bytes, bytes],
        http_1_1: bool,
    ) -> None:
        super().__init__(headers, target[0])
        self.method, self.query = method, target[1]
        self._connection, self._http_1_1 = connection, http_1_1
        self._pieces: list[Any] = []  # of the body, not yet taken by the application: bytes, or small ones joined
        expect = headers.get(b"expect")
        self._expects_continue = expect is not None and expect.lower() == b"100-continue"

    def is_disconnected(self) -> bool:
        """Return True once the client is known to be gone; a request that waited is then not computed.

        A client that closed the whole connection and one that closed it for sending only look the same until something
        is written: the first answers that with a reset. asyncio does not report it, as it no longer reads.
        """
        if self.half_closed and not self.gone:
            sock = self._connection.transport.get_extra_info("socket")
            self.gone = sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return self.gone

    def probe_client(self) -> None:
        """Write what a client may get at any time before its response; HTTP/1.0 does not know it."""
        transport = self._connection.transport
        if not self.started and not self.gone and self._http_1_1 and not transport.is_closing():
            transport.write(_CONTINUE)

    @property
    def address(self) -> str:
        return self._connection.address

    @property
    def is_waiting_for_body(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    # For the application

    async def receive(self) -> tuple[bytes, bool]:
        """Return the next piece of the body and whether more is to come."""
        if self._expects_continue:
            self._expects_continue = False
            if self._more and not self.gone and not self.started:
                self._connection.transport.write(_CONTINUE)
        while self._more and self.untaken_bytes < _HIGH_WATER_BYTES and not self.gone:
            await self._next_piece()
        if self.gone:
            raise Disconnected("the client hung up in the middle of its request")
        body: bytes = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._taken_bytes = [], self.body_bytes
        return body, self._more

    async def discard_body(self) -> None:
        """Read and drop the rest of the body of an answered request, until it ends or the client is gone."""
        while self._more and not self.gone:
            await self._next_piece()

    @property
    def is_writable(self) -> bool:
        """False while the client is too far behind with reading responses."""
        return not self._connection.backpressure.paused

    async def respond(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Write a whole response as soon as the client has taken enough of those before it."""
        if self._connection.backpressure.paused:
            await self._connection.await_writable(len(body))
        self.respond_now(status, headers, body)

    def respond_now(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        if self.gone:
            return
        head = self._head(status, headers, _LENGTH % len(body))
        self.started = self.answered = True
        self._connection.transport.write(head if self.method == "HEAD" else head + body)

    def pause(self) -> Callable[[], None]:
        """Read no further request of this client for now; return what ends that."""
        self._connection.pause()
        return self._connection.end_pause

    def start_stream(self, status: int, headers: Iterable[Header]) -> None:
        """Begin a response of unknown length; HTTP/1.0 has no chunks, there it ends with the connection."""
        if not self._http_1_1:
            self.keep_alive = False
        self._unsent_head = self._head(status, headers, _CHUNKED if self._http_1_1 else b"")
        self.started = True

    async def send_part(self, part: bytes) -> None:
        """Write a part of a stream, once the client has taken enough of those before it."""
        connection = self._connection
        if connection.backpressure.paused:
            await connection.await_writable(len(part))
        if part and not self.gone:
            chunk = b"%x\r\n%b\r\n" % (len(part), part) if self._http_1_1 else part
            connection.transport.write(self._unsent_head + chunk)
            self._unsent_head = b""

    def end_stream(self) -> None:
        self.answered = True
        if not self.gone:
            self._connection.transport.write(self._unsent_head + (b"0\r\n\r\n" if self._http_1_1 else b""))

    def _head(self, status: int, headers: Iterable[Header], framing: bytes) -> bytes:
        if self.started:
            raise RuntimeError("a second response to one request")
        common = self._connection.host.common_headers
        lines = [_STATUS[status], common, framing]
        for name, value in headers:
            if name == b"connection":
                self.keep_alive = False
            else:
                lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(_CLOSE)
        lines.append(b"\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) - 1 - (not framing) + common.count(b"\n"):
            raise RuntimeError("a header with a line break in it")
        return head

    # For the connection

    def add_body(self, pieces: Sequence[bytes]) -> None:
        count = len(pieces)
        size = len(pieces[0]) if count == 1 else sum(map(len, pieces))
        self.body_bytes += size
        if self.answered:  # read only to reach the next request
            self._pieces, self._taken_bytes = [], self.body_bytes
            return
        if size > _SMALL_PIECE_BYTES * count or (count == 1 and not self._pieces):
            self._pieces += pieces
            self._small_pieces = None
        else:  # as an object of its own each byte would take forty
            if self._small_pieces is None:
                self._small_pieces = bytearray()
                self._pieces.append(self._small_pieces)
            self._small_pieces += b"".join(pieces)
        if self.body_bytes - self._taken_bytes >= _HIGH_WATER_BYTES:
            self._connection.pause_reading()
            self._wake()

    def end_body(self) -> None:
        self._more = False
        self._wake()

    @property
    def untaken_bytes(self) -> int:
        return self.body_bytes - self._taken_bytes

    def lose_client(self) -> None:
        self.gone = True
        self._pieces, self._taken_bytes = [], self.body_bytes
        self._wake()

    async def _next_piece(self) -> None:
        self._connection.wait_for_body()
        self._waiter = self._connection.loop.create_future()
        await self._waiter
        self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class Host:
    """What a connection needs of its listener."""

    app: Application[Any]
    log: Log
    maximum: int  # of connections
    peers: PeerLimits
    received: BufferLimit  # that the application has not taken yet
    unsent: BufferLimit
    connections: set[Connection]
    orphans: set[asyncio.Task[None]]  # what answers clients that are gone
    common_headers: bytes = b""  # of every response


class Connection(asyncio.Protocol):
    """Requests are parsed as they come and answered one after the other.

    A client may send a thousand requests at once. Each turn of the event loop parses and begins a bounded part of
    them, so that other connections have their turn; nothing more is read meanwhile.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.loop = asyncio.get_running_loop()
        self._body: list[bytes] = []  # pieces that the request has not got yet; they all come from one slice
        self.on_body = self._body.append  # which the parser calls for each of them: no function of ours is as quick
        self._parser: Any = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport
        self._is_tls = False
        self.address = ""  # of the peer
        self._is_counted = False  # among the connections of its address
        self._data, self._parsed = b"", 0  # what has arrived and is not parsed yet begins at `_parsed`
        self.current: Request | None = None  # the request that is being answered
        self._reading: Request | None = None  # the one whose body is still coming
        self._queue: deque[Request] = deque()  # parsed requests, whose turn has not come
        self._refusal = b""  # sent when the requests before it are answered; nothing more is read
        self._url, self._head_is_open = b"", False
        self._line_end = b""  # the last character of a request line whose end has not come
        self._headers: list[Header] = []
        self._paused_at = 0.0  # since when the next request may have waited in the kernel
        self._head_bytes = 0  # of an unfinished head, without the slice in which it began
        self._useful = False  # the last slice contained the end of a head or a part of a body
        self._overhead_bytes = 0  # since something useful was parsed
        self._body_pieces = 0  # in the last slice
        self._skipped_framing: bytes | None = None  # of the body that the parser skips behind a request to upgrade
        self._has_received = False  # anything at all
        self._due = 0.0  # on the loop's clock: by then the client must have sent what we wait for
        self._replays = False  # the parser gets the framing of that body, which is no new request
        self._held_bytes = 0  # as accounted in the limits
        self.backpressure, self._write_timeout = WriteBackpressure(), WriteTimeout()
        self._ending = self._read_paused = self._half_closed = self._turn_is_due = self._is_in_pause = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports only behave like the class
        self.transport.set_write_buffer_limits(UNSENT_HIGH_WATER_BYTES)
        self._is_tls = bool(transport.get_extra_info("sslcontext"))
        self._due = self.loop.time() + KEEP_ALIVE_SECONDS
        connections = self.host.connections
        self.address = peer_address(transport.get_extra_info("peername"))
        if self.host.peers.admit(self.address):
            self._is_counted = True
            if not make_room(connections, self.host.maximum):
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{len(connections)} connections are being served already")
        else:
            text = f"{self.host.peers.maximum} connections from this address are being served already"
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text)
        connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._leave()
        for request in filter(None, (self.current, self._reading)):
            request.lose_client()
        self._queue.clear()
        self._data, self._parsed = b"", 0
        self.host.received.hold(self._give_up_received, 0)
        self._parser = None  # which refers to us: a reference cycle would wait for the garbage collector
        self.resume_writing()
        if self.current is not None and self.current.answering is not None:  # the loop holds no reference to a task
            self.host.orphans.add(self.current.answering)
            self.current.answering.add_done_callback(self.host.orphans.discard)

    def data_received(self, data: bytes) -> None:
        if self._refusal or self.transport.is_closing():
            return
        self._has_received = True
        if self._data:
            self._data, self._parsed = self._data[self._parsed :] + data, 0
        elif self._queue or len(data) > SLICE_BYTES:
            self._data = data
        elif (parsed := self._parse(data)) < len(data):
            if not self._refusal:
                self._data, self._parsed = data, parsed
        elif len(self._queue) == 1 and self._reading is None and self.current is None and not self._held_bytes:
            self._begin(self._queue.popleft())  # as mostly: one whole request, and nothing else to do
            return
        if not self._turn_is_due:
            self._go_on()

    def eof_received(self) -> bool:
        """Note that the client sends no more. True keeps the connection open, as it may still read responses."""
        if self._is_tls:  # which cannot be closed by half
            return False
        self._half_closed = True
        if self._refusal and self.is_idle:
            return False
        if self._head_is_open or self._reading is not None:
            self._refuse(HTTPStatus.BAD_REQUEST, "the connection was closed for sending in the middle of a request")
            return True
        for request in filter(None, (self.current, *self._queue)):
            request.half_closed = True
        if self.current is None:
            return bool(self._queue or self._data)
        self.loop.call_later(_PROBE_SECONDS, self.current.probe_client)
        return True

    def pause_writing(self) -> None:
        self.backpressure.paused = True
        self.host.unsent.hold(self._give_up_unsent, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self.host.unsent.hold(self._give_up_unsent, 0)
        self.backpressure.resume()

    async def await_writable(self, size: int) -> None:
        """Wait until the client has read enough of the responses before one of this size."""
        if self.backpressure.paused:
            self.host.unsent.hold(self._give_up_unsent, self.transport.get_write_buffer_size() + size)
            await self.backpressure.drained(self.transport)

    # Parsing and beginning a bounded part in each turn of the event loop

    def _go_on(self) -> None:
        """Begin requests and parse more, as much as one turn of the event loop may, then read on if nothing is left."""
        begun = cost = 0
        while self._data or self._queue:
            if self._queue and self.current is not None:
                break
            if begun == _REQUESTS_PER_TURN or cost >= _COST_PER_TURN:
                self._go_on_later()
                break
            if begun and self.transport.is_closing():
                return
            if self._queue:
                begun += 1
                self._begin(self._queue.popleft())
            else:
                cost += self._parse_slice()
        if self._queue or self._data or self._reading is not None or self._head_is_open or self._held_bytes:
            self._account_received()
        if self._read_paused and not self._is_in_pause and self._is_waiting_for_client():
            self._resume_reading()

    def _go_on_later(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_is_due = False
        self._go_on()

    def _parse_slice(self) -> int:
        """Parse one head, a body of stated length as far as it is there, or a bounded part of anything else.

        Return what it cost, about in bytes of heads.
        """
        data, start, reading = self._data, self._parsed, self._reading
        end, cost = start + SLICE_BYTES, 0
        length = -1 if reading is None else reading.length
        if reading is None:
            if end < len(data):
                head_end = data.find(_HEAD_END, start, end) + len(_HEAD_END)
                if head_end > len(_HEAD_END) and data.find(_HEAD_END, head_end, head_end + _NEXT_HEAD_BYTES) < 0:
                    end = head_end  # the body behind it may be large, and is then one piece
            cost = end - start
        elif length >= 0:
            end = start + length - reading.body_bytes
        else:
            end = start + _CHUNKED_SLICE_BYTES
        self._body_pieces = 0
        parsed = self._parse(data[start:end] if length < 0 else memoryview(data)[start:end])
        self._parsed += parsed
        if self._refusal or self._parsed >= len(data):
            self._data, self._parsed = b"", 0
        return cost + _SLICE_COST + _PIECE_COST * self._body_pieces

    def _parse(self, data: bytes | memoryview) -> int:
        """Parse these bytes, or those up to the end of a request to upgrade; return how many that were.

        The parser's callbacks put each complete head into the queue.
        """
        was_open, parsed, place = self._head_is_open, len(data), 0
        try:
            try:
                feed = self._parser.feed_data
                while place < parsed:
                    reading = self._reading
                    if reading is not None and reading.length >= 0:
                        end = place + reading.length - reading.body_bytes
                    else:
                        end = self._part_end(data, place)
                    feed(data[place:end])
                    place = end
            except httptools.HttpParserUpgrade as upgrade:  # to an unsupported protocol: ignore the upgrade
                parsed = place + upgrade.args[0]
                self._read_skipped_body()
        except httptools.HttpParserCallbackError:  # the callbacks below do not fail: this is a bug
            self.host.log.failed("parsing failed")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
        except httptools.HttpParserError as error:
            if not self._is_ended_by_client():
                self._refuse(*describe_parser_error(str(error)))
            return parsed
        if self._body:
            self._hand_over_body()
        if self._useful and not self._head_is_open:
            self._useful, self._overhead_bytes = False, 0
        else:
            self._check_overhead(parsed, was_open)
        return parsed

    def _part_end(self, data: Any, place: int) -> int:
        """Return how far the parser may go on outside a body of stated length: to the end of a head, or of newlines.

        It skips several blanks in a request line, so each such line is checked before it is parsed.
        """
        if data[place] in b"\r\n":
            self._line_end = b""
            return cast("re.Match[bytes]", _NEWLINES.match(data, place)).end()
        if self._reading is None and (self._line_end or not self._head_is_open):
            line_end = data.find(b"\n", place)
            has_several = data.find(b"  ", place, line_end if line_end >= 0 else len(data)) >= 0
            if has_several or (self._line_end == b" " and data.startswith(b" ", place)):
                raise httptools.HttpParserError("several blanks")
            self._line_end = b"" if line_end >= 0 else data[-1:]
        end: int = data.find(_HEAD_END, place)
        return end + len(_HEAD_END) if end >= 0 else len(data)

    def _check_overhead(self, parsed: int, was_open: bool) -> None:
        """Refuse endless heads and trailers after a slice of that size; `was_open`: it began within a head."""
        if self._head_is_open:
            if was_open:
                self._head_bytes += parsed
            else:
                self._head_bytes, self._due = 0, self.loop.time() + HEAD_TIMEOUT_SECONDS
            if too_long := check_partial_head(self._head_bytes, len(self._headers)):
                self._refuse(*too_long)
        else:
            self._overhead_bytes += parsed
            if self._overhead_bytes > MAX_HEAD_BYTES:
                text = f"more than {MAX_HEAD_BYTES} bytes surround the pieces of a body, or are outside of any request"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def _read_skipped_body(self) -> None:
        """Read the body of a request to upgrade, which the parser takes for data of the other protocol."""
        if (framing := self._skipped_framing) is None or self._refusal:
            return
        self._skipped_framing, self._replays = None, True
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        self._replays = False

    def _account_received(self) -> None:
        """Account for the memory of what has arrived and the application has not taken; read no more if it waits."""
        size = len(self._data) + _REQUEST_BYTES * len(self._queue)
        if self._reading is not None:
            size += self._reading.untaken_bytes
        elif self._head_is_open:
            size += self._head_bytes + SLICE_BYTES
        if self._queue or self._data:
            self.pause_reading()
        if size != self._held_bytes:
            self._held_bytes = size
            self.host.received.hold(self._give_up_received, size)

    def _is_waiting_for_client(self) -> bool:
        """Return True if nothing is left to do without more from the client."""
        if self._queue or self._data:
            return False
        return self.current is None or self.current.is_waiting_for_body

    def _give_up_received(self) -> None:
        """Forget what has arrived, since all connections together hold too much and this one has for longest."""
        self._data, self._parsed = b"", 0
        self._queue.clear()
        text = "too many bodies are arriving, and this one has taken longest; try again in a moment"
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, text)

    def _give_up_unsent(self) -> None:
        """Drop the responses that the client does not read, for the same reason."""
        self.host.log.refused("unread_responses")
        self.transport.abort()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._head_is_open = not self._replays
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_open:  # else it is a trailer, which must not pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._refusal or not self._head_is_open:
            return
        self._head_is_open, self._useful = False, True
        parser, headers, url = self._parser, self._headers, self._url
        fields = dict(headers)
        version, method = parser.get_http_version(), parser.get_method()
        wrong = check_head(version, method, url, headers, fields, self._head_bytes)
        self._head_bytes = 0
        if wrong is not None:
            self._refuse(*wrong)
            return
        http_1_1 = version == "1.1"
        request = self.host.app.request_class(self, method.decode("latin-1"), split_target(url), fields, http_1_1)
        request.keep_alive = http_1_1 and parser.should_keep_alive() and not self._ending
        request.length = int(fields.get(b"content-length", -1))  # the parser refused what is not a number
        if parser.should_upgrade():
            framing = [b"%b: %b\r\n" % pair for pair in headers if pair[0] in _FRAMING_HEADERS]
            if framing:
                self._skipped_framing = b"".join(framing) + (b"" if request.keep_alive else _CLOSE)
        if self._paused_at:
            request.received_at, self._paused_at = self._paused_at, 0.0
        self._reading = request
        self._queue.append(request)

    def on_message_complete(self) -> None:
        if self._body:  # always: no piece may reach the next request
            self._hand_over_body()
        if self._skipped_framing is not None or self._reading is None:
            return
        request, self._reading = self._reading, None
        request.end_body()
        if request.answered:
            self._due = self.loop.time() + KEEP_ALIVE_SECONDS

    def _hand_over_body(self) -> None:
        """Give the request the pieces of its body that the parser has found."""
        self._useful, pieces = True, self._body
        self._body_pieces += len(pieces)
        if self._reading is not None:
            self._reading.add_body(pieces)
        pieces.clear()

    # Answering

    def _begin(self, request: Request) -> None:
        """Have the application answer a request whose turn has come."""
        self.current = request
        try:
            answering = self.host.app.begin(request)
        except Exception:  # the application answers for its own errors: this is a bug
            self._answer_fault(request)
            answering = None
        if answering is None:
            self.current = None
            self._end(request)
        else:
            request.answering = self.loop.create_task(self._run_answer(request, answering))

    async def _run_answer(self, request: Request, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
            if not request.answered and not request.gone:
                raise RuntimeError("the application ended without a response")
        except Exception:  # likewise
            self._answer_fault(request)
        finally:
            self.current = None
            self._end(request)
            if (self._queue or self._data or self._read_paused or self._held_bytes) and not self._turn_is_due:
                self._go_on()

    def _answer_fault(self, request: Request) -> None:
        """Log the current exception and answer with an opaque 500."""
        self.host.log.failed("request failed", request_id=request.id.decode(), path=request.path)
        if not request.started and not request.gone:
            common = b"%bx-request-id: %b\r\n" % (self.host.common_headers, request.id)
            self.transport.write(closing_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", common))
        request.started = request.answered = True
        request.keep_alive = False

    def _end(self, request: Request) -> None:
        """Close after this answered request, or wait for more; it may have been answered before its body was read."""
        if request.started and request.gone:
            self.transport.close()  # in the middle of a response
        elif self._refusal and request.gone and not self.transport.is_closing():
            self._send_refusal()
        elif not request.keep_alive or self.transport.is_closing():
            self.transport.close()
        elif self._queue or self._data:
            return
        elif self._refusal:
            self._send_refusal()
        elif self._half_closed:
            self.transport.close()
        elif self._head_is_open:
            self._due = self.loop.time() + HEAD_TIMEOUT_SECONDS
        else:
            self._due = self.loop.time() + (BODY_TIMEOUT_SECONDS if self._reading is request else KEEP_ALIVE_SECONDS)

    def wait_for_body(self) -> None:
        """Read on, and give the client its time."""
        self._due = self.loop.time() + BODY_TIMEOUT_SECONDS
        if self._data:
            self._go_on_later()
        else:
            self._resume_reading()

    def pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def pause(self) -> None:
        """Leave what the client sends next in the kernel, until `end_pause`."""
        self._is_in_pause = True
        self._paused_at = time.monotonic()
        self.pause_reading()

    def end_pause(self) -> None:
        self._is_in_pause = False
        if not self.transport.is_closing():
            # Two turns later, what was sent during the pause has been read.
            self.loop.call_soon(self.loop.call_soon, self._forget_pause, self._paused_at)
            self._go_on()

    def _forget_pause(self, paused_at: float) -> None:
        """What comes now was sent after that pause; the next one may have begun meanwhile."""
        if self._paused_at == paused_at:
            self._paused_at = 0.0

    def _resume_reading(self) -> None:
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

    # Refusing what does not reach the application

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        if self._refusal or self.transport.is_closing():
            return
        if (reading := self._reading) is not None:
            if reading.answered:
                self.transport.close()
                return
            self._reading = None  # the rest of its body never comes
            if self._queue and self._queue[-1] is reading:
                self._queue.pop()
            else:
                reading.lose_client()
        self._data, self._parsed = b"", 0
        made = request_id(None)
        self.host.log.refused(f"http_{status:d}", status=int(status), reason=text, request_id=made.decode())
        self._refusal = closing_response(status, text, b"%bx-request-id: %b\r\n" % (self.host.common_headers, made))
        if self.current is None and not self._queue:
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Write it, and read for a while what a client is still sending."""
        self.transport.write(self._refusal)
        if self._half_closed:
            self.transport.close()
            return
        self._resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._due = self.loop.time() + LINGER_SECONDS

    def _is_ended_by_client(self) -> bool:
        """What follows a request with `connection: close` is ignored."""
        last = self._queue[-1] if self._queue else self.current
        return last is not None and not last.keep_alive and self._reading is None

    # Called by the listener and by other connections

    def drain(self) -> None:
        """Answer the requests that have arrived, then close."""
        self._ending = True
        if self.is_idle:
            self.transport.close()
        else:
            requests = [*filter(None, (self.current,)), *self._queue]
            for request in requests:
                request.keep_alive = request is not requests[-1] or bool(self._data)

    def check_timeouts(self, now: float) -> None:
        """Give up on a client that does not take its response, or does not send what we wait for."""
        if self._write_timeout.is_over(self.transport, now):
            self.transport.abort()
            return
        if now < self._due or (self.current is not None and not self.current.is_waiting_for_body):
            return
        if self.current is None and (self._refusal or not self._head_is_open):
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole in time")

    @property
    def awaits_request(self) -> bool:
        """True while the head of the connection's first request, or of any begun one, has not come whole."""
        return self._head_is_open or not self._has_received

    @property
    def is_idle(self) -> bool:
        return self.current is None and not self._queue and not self._data

    @property
    def idle_until(self) -> float | None:
        return self._due if self.is_idle else None

    def give_way(self) -> None:
        if self._head_is_open:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole while others wait for room")
        self.transport.close()
        self._leave()

    def _leave(self) -> None:
        """Stop counting this connection."""
        self.host.connections.discard(self)
        if self._is_counted:
            self.host.peers.release(self.address)
            self._is_counted = False


Refusal = tuple[HTTPStatus, str]


def check_head(
    version: str, method: bytes, url: bytes, headers: Sequence[Header], fields: Mapping[bytes, bytes], size: int
) -> Refusal | None:
    """Refuse a head that is too long, or that RFC 9112 forbids and the parser accepts.

    `fields` has the last value of each header. The bytes of a head need not be added up where `size` is 0.
    """
    if len(url) > MAX_URL_BYTES:
        return HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL is longer than {MAX_URL_BYTES} bytes"
    if len(headers) > MAX_HEADERS or (size and sum([len(one) for pair in headers for one in pair]) > MAX_HEAD_BYTES):
        text = f"the head has more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES} bytes of them"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text
    if version == "0.9":  # which had none: mostly a broken line
        return HTTPStatus.BAD_REQUEST, "the request line names no version; send HTTP/1.1"
    if version not in ("1.1", "1.0"):
        return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{version} is not spoken here; send HTTP/1.1"
    host = fields.get(b"host")
    if host is None:
        if version == "1.1":
            return HTTPStatus.BAD_REQUEST, "host: the header is missing, which HTTP/1.1 requires"
    elif not is_host(host) or (len(fields) < len(headers) and sum(name == b"host" for name, _ in headers) > 1):
        return HTTPStatus.BAD_REQUEST, "host: must be given once, as a name or an address with or without a port"
    if b"transfer-encoding" in fields and (wrong := _check_transfer_encoding(version, headers)):
        return wrong
    if not url.startswith(b"/") or url.find(b"#") >= 0:
        return _check_target(method, url)
    return None


@functools.lru_cache(maxsize=256)
def is_host(value: bytes) -> bool:
    """Return True for a name or an address, with or without a port, and for nothing, as RFC 9110 allows."""
    return _HOST.fullmatch(value) is not None


def _check_transfer_encoding(version: str, headers: Sequence[Header]) -> Refusal | None:
    """Refuse all codings but `chunked`, with 501 where a body is framed and we only do not know how to decode it."""
    if version == "1.0":
        return HTTPStatus.BAD_REQUEST, "transfer-encoding: HTTP/1.0 has none"
    names = b",".join([value for name, value in headers if name == b"transfer-encoding"]).lower().split(b",")
    codings = [name.strip() for name in names]
    if codings == [b"chunked"]:
        return None
    if codings[-1] == b"chunked" and b"chunked" not in codings[:-1]:
        return HTTPStatus.NOT_IMPLEMENTED, "transfer-encoding: only chunked is supported; use content-encoding"
    return HTTPStatus.BAD_REQUEST, "transfer-encoding: must be chunked"


def _check_target(method: bytes, url: bytes) -> Refusal | None:
    """Refuse a target that is neither a path nor the URL of an HTTP service; only OPTIONS has `*`."""
    if method == b"CONNECT":
        return HTTPStatus.NOT_IMPLEMENTED, "CONNECT: this is no proxy"
    if (url == b"*" and method == b"OPTIONS") or (_ABSOLUTE_URL.fullmatch(url) and b"#" not in url):
        return None
    return HTTPStatus.BAD_REQUEST, "the target of the request must be a path, or a URL with http: or https:"


def check_partial_head(size: int, headers: int) -> Refusal | None:
    """Refuse a head that is too long before all of it is in memory."""
    if size <= MAX_HEAD_BYTES + MAX_URL_BYTES and headers <= MAX_HEADERS:
        return None
    text = f"the head of the request is longer than {MAX_HEAD_BYTES} bytes, or has more than {MAX_HEADERS} headers"
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text


def describe_parser_error(text: str) -> Refusal:
    """Return the status and the sentence for an error of the parser: 505 where another version is named."""
    if text in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
        return HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "only HTTP/1.1 and HTTP/1.0 are spoken here"
    return HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request"


def split_target(url: bytes) -> tuple[str, bytes]:
    """Return the decoded path and the query."""
    path, query = url, b""
    if url.startswith(b"/"):
        path, _, query = url.partition(b"?")
    else:
        try:  # as a client sends it to a proxy
            parsed = httptools.parse_url(url)
            path, query = parsed.path or b"/", parsed.query or b""
        except httptools.HttpParserError:
            pass
    text = path.decode("latin-1")
    return urllib.parse.unquote(text) if "%" in text else text, query


_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=%-]{0,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{0,5})?")
_ABSOLUTE_URL = re.compile(rb"(?i:https?)://(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?(?:[/?].*)?")
_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
_HEAD_END = b"\r\n\r\n"
_NEWLINES = re.compile(rb"[\r\n]+")
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_CONTINUE = _STATUS[100] + b"\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LENGTH = b"content-length: %d\r\n"


def closing_response(status: HTTPStatus, text: str, headers: bytes) -> bytes:
    """Return a whole response that ends the connection."""
    body = orjson.dumps({"error": text})
    lines = (_STATUS[status], headers, b"content-type: application/json\r\n", _LENGTH % len(body), _CLOSE, b"\r\n")
    return b"".join([*lines, body])
