"""HTTP/1.1 connections: parse requests in order and within limits, and write each response in one piece.

uvicorn runs `Connection` in place of its own protocol; it needs no timer, no event and no second copy of the headers.
An application gets each request as an `HttpRequest`: first its head, to refuse it without a task or to return the
coroutine that answers it. Below are, in this order: the application's side, the request, the connection, the limits of
a head and of what surrounds a body, and the bytes of responses.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
import orjson
from uvicorn.config import Config
from uvicorn.server import ServerState

from serve.errors import ClientDisconnected
from serve.http1.limits import WriteBackpressure, make_room
from serve.logs import faults, log_fields, refusals
from serve.request_context import RequestContext, request_id

HEAD_SECONDS = 10.0  # for a head to arrive, from its first byte to its last
BODY_SECONDS = 60.0  # for a body, likewise
_PROBE_SECONDS = 0.02  # after a client half-closed; most requests are answered by then
_LINGER_SECONDS = 2.0  # for a refused client to stop sending: closing on unread bytes would lose the response
_HIGH_WATER_BYTES = 256 << 10  # of a body are handed over at once; below it the application is not woken
MAX_HEAD_BYTES = 32 << 10
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128

Header = tuple[bytes, bytes]

log = logging.getLogger(__name__)


class Application(Protocol):
    def begin(self, request: HttpRequest) -> Coroutine[Any, Any, None] | None:
        """Decide by its head alone what becomes of a request, as soon as its turn has come.

        Return the coroutine that answers it, or None if it has been answered at once.
        """
        ...


class HttpRequest(RequestContext):
    """One request of a connection, and its response."""

    def __init__(
        self, connection: Connection, method: str, target: tuple[str, bytes], headers: Sequence[Header], http_1_1: bool
    ) -> None:
        super().__init__(dict(headers), target[0])
        self.method, self.query = method, target[1]
        self.keep_alive = True  # the connection goes on after this request
        self.answering: asyncio.Task[None] | None = None
        self.gone = False  # the client disconnected
        self.half_closed = False  # the client sends no more; it may be gone, or still listen
        self.started = self.answered = False  # a response has been begun, or written completely
        self._connection, self._http_1_1 = connection, http_1_1
        self._unsent_head = b""  # of a stream, written together with its first part
        self._chunks: list[bytes] = []  # of the body, not yet taken by the application
        self._chunk_bytes = 0
        self._more = True  # of the body is to come
        self._waiter: asyncio.Future[None] | None = None
        self._expects_continue = self.headers.get(b"expect", b"").lower() == b"100-continue"

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
    def is_waiting_for_body(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    # For the application

    async def receive(self) -> tuple[bytes, bool]:
        """Return the next piece of the body and whether more is to come."""
        if self._expects_continue:
            self._expects_continue = False
            if self._more and not self.gone and not self.started:
                self._connection.transport.write(_CONTINUE)
        while self._more and self._chunk_bytes < _HIGH_WATER_BYTES and not self.gone:
            await self._next_piece()
        if self.gone:
            raise ClientDisconnected("the client hung up in the middle of its request")
        body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks, self._chunk_bytes = [], 0
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
        connection = self._connection
        if connection.backpressure.paused:
            await connection.backpressure.drained(connection.transport)
        self.respond_now(status, headers, body)

    def respond_now(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        if self.gone:
            return
        head = self._head(status, headers, _LENGTH % len(body))
        self.started = self.answered = True
        self._connection.transport.write(head if self.method == "HEAD" else head + body)

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
            await connection.backpressure.drained(connection.transport)
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
        common = self._connection.common_headers
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

    def add_body(self, piece: bytes) -> None:
        if self.answered:  # read only to reach the next request
            return
        self._chunks.append(piece)
        self._chunk_bytes += len(piece)
        if self._chunk_bytes >= _HIGH_WATER_BYTES:
            if self._waiter is None:
                self._connection.pause_reading()
            self._wake()

    def end_body(self) -> None:
        self._more = False
        if self._waiter is not None:
            self._wake()

    def lose_client(self) -> None:
        self.gone = True
        self._wake()

    async def _next_piece(self) -> None:
        self._connection.wait_for_body()
        self._waiter = self._connection.loop.create_future()
        await self._waiter
        self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Connection(asyncio.Protocol):
    """Requests are parsed as they come and answered one after the other."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002  # the signature is uvicorn's
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        app: Application,
        count_rejected: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`count_rejected` gets the reason of each request that does not reach the application."""
        self._app, self._count_rejected = app, count_rejected
        self._keep_alive_seconds = config.timeout_keep_alive
        self._max_connections = config.limit_concurrency or sys.maxsize
        self._state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._framing = BodyFraming(self._parser)
        self.transport: asyncio.Transport
        self._is_tls = False
        self.current: HttpRequest | None = None  # the request that is being answered
        self._reading: HttpRequest | None = None  # the one whose body is still coming
        self._queue: deque[HttpRequest] = deque()  # pipelined requests, whose turn has not come
        self._refusal = b""  # sent when the requests before it are answered; nothing more is read
        self._url, self._head_is_open = b"", False
        self._headers: list[Header] = []
        self._head_bytes = self._received_bytes = 0  # of a head in several pieces, those before this one; and this one
        self._due = 0.0  # on the loop's clock: by then the client must have sent what we wait for
        self.backpressure = WriteBackpressure()
        self._ending = self._read_paused = self._half_closed = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's transports only behave like the class
        self._is_tls = bool(transport.get_extra_info("sslcontext"))
        connections: set[Any] = self._state.connections  # uvicorn's type names its own protocols
        if not make_room(connections, self._max_connections):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{len(connections)} connections are being served already")
        connections.add(self)
        self._due = self.loop.time() + self._keep_alive_seconds

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._state.connections.discard(self)
        for request in filter(None, (self.current, self._reading)):
            request.lose_client()
        self._queue.clear()
        self.resume_writing()
        if self.current is not None and self.current.answering is not None:  # the loop holds no reference to a task
            self._state.tasks.add(self.current.answering)
            self.current.answering.add_done_callback(self._state.tasks.discard)

    def data_received(self, data: bytes) -> None:
        if self._refusal or self.transport.is_closing():
            return
        if not self._head_bytes and self._reading is None:
            self._due = self.loop.time() + HEAD_SECONDS
        self._received_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # to an unsupported protocol: ignore the upgrade
            self._framing.resume()
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
            return
        except httptools.HttpParserError:
            if not self._is_ended_by_client():
                self._refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
            return
        if self._head_is_open:
            self._head_bytes += len(data)
            if too_long := check_partial_head(self._head_bytes):
                self._refuse(*too_long)
        elif self._reading is not None and (too_long := self._framing.check_overhead(len(data))):
            self._refuse(*too_long)

    def eof_received(self) -> bool:
        """Note that the client sends no more. True keeps the connection open, as it may still read responses."""
        if self._is_tls:  # which cannot be closed by half
            return False
        self._half_closed = True
        if self._head_is_open or self._reading is not None:
            self._refuse(HTTPStatus.BAD_REQUEST, "the connection was closed for sending in the middle of a request")
            return True
        for request in filter(None, (self.current, *self._queue)):
            request.half_closed = True
        if self.current is None:
            return False
        self.loop.call_later(_PROBE_SECONDS, self.current.probe_client)
        return True

    def pause_writing(self) -> None:
        self.backpressure.pause()

    def resume_writing(self) -> None:
        self.backpressure.resume()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._head_is_open = not self._framing.replaying
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_open:  # else it is a trailer, which must not pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._refusal or not self._head_is_open or self.transport.is_closing():
            return
        parser, headers = self._parser, self._headers
        self._framing.note_head(headers)
        size = self._head_bytes + self._received_bytes
        self._head_is_open, self._head_bytes = False, 0
        if too_long := check_head(self._url, headers, size):
            self._refuse(*too_long)
            return
        http_1_1 = parser.get_http_version() == "1.1"
        request = HttpRequest(self, parser.get_method().decode("latin-1"), split_target(self._url), headers, http_1_1)
        request.keep_alive = http_1_1 and parser.should_keep_alive() and not self._ending
        self._reading = request
        if self.current is None:
            self._start(request)
        else:
            self._queue.append(request)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._framing.useful = True
        if self._reading is not None:
            self._reading.add_body(body)

    def on_message_complete(self) -> None:
        if self._framing.awaits_body or self._reading is None:
            return
        request, self._reading = self._reading, None
        request.end_body()
        if self.current is None:  # it was answered before
            self._due = self.loop.time() + self._keep_alive_seconds

    # Answering

    def _start(self, request: HttpRequest) -> None:
        """Have the application answer a request whose turn has come."""
        self.current = request
        answering = self._app.begin(request)
        if answering is None:
            self._state.total_requests += 1
            self.current = None
            self._go_on(request)
        else:
            RequestContext.in_progress += 1
            request.answering = self.loop.create_task(self._answer(request, answering))

    async def _answer(self, request: HttpRequest, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
            if not request.answered and not request.gone:
                raise RuntimeError("the application ended without a response")
        except Exception:  # the application answers for its own errors: this is a bug, so log it and leak nothing
            if faults.allows():
                log.exception("request failed", extra=log_fields(request_id=request.id.decode(), path=request.path))
            if not request.started and not request.gone:
                common = b"%bx-request-id: %b\r\n" % (self.common_headers, request.id)
                self.transport.write(closing_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error", common))
            request.started = request.answered = True
            request.keep_alive = False
        finally:
            RequestContext.in_progress -= 1
            self._state.total_requests += 1
            self.current = None
            self._go_on(request)
            while self._queue and self.current is None and not self.transport.is_closing():
                self._start(self._queue.popleft())

    def _go_on(self, request: HttpRequest) -> None:
        """Close or go on after this answered request, which may have been answered before its body was read."""
        if self._refusal and request.gone and not self.transport.is_closing():
            self._send_refusal()
        elif not request.keep_alive or self.transport.is_closing():
            self.transport.close()
        elif self._queue:
            return
        elif self._refusal:
            self._send_refusal()
        elif self._half_closed:
            self.transport.close()
        else:
            self._due = self.loop.time() + (BODY_SECONDS if self._reading is request else self._keep_alive_seconds)
            self._resume_reading()

    @property
    def common_headers(self) -> bytes:
        """The headers of every response; uvicorn makes a new list when the second changes."""
        headers = self._state.default_headers
        if _encoded_headers[0] is not headers:
            _encoded_headers[:] = headers, b"".join([b"%b: %b\r\n" % pair for pair in headers])
        return cast("bytes", _encoded_headers[1])

    def wait_for_body(self) -> None:
        """Read on, and give the client its time."""
        self._due = self.loop.time() + BODY_SECONDS
        self._resume_reading()

    def pause_reading(self) -> None:
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()

    # Refusing what does not reach the application

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        if self._refusal or self.transport.is_closing():
            return
        if self._reading is not None:
            if self._reading.answered:
                self.transport.close()
                return
            self._reading.lose_client()  # the rest of its body never comes
        self._count_rejected(f"http_{status:d}")
        made = request_id(None)
        if refusals.allows():
            log.info("refused", extra=log_fields(status=int(status), reason=text, request_id=made.decode()))
        self._refusal = closing_response(status, text, b"%bx-request-id: %b\r\n" % (self.common_headers, made))
        if self.current is None:
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
        self._due = self.loop.time() + _LINGER_SECONDS

    def _is_ended_by_client(self) -> bool:
        """What follows a request with `connection: close` is ignored."""
        last = self._queue[-1] if self._queue else self.current
        return last is not None and not last.keep_alive and self._reading is None

    # Called by the listener and by other connections

    def shutdown(self) -> None:
        """Answer the requests that have arrived, then close; uvicorn calls it."""
        self._ending = True
        if self.current is None:
            self.transport.close()
        else:
            for request in (self.current, *self._queue):
                request.keep_alive = request is not (self._queue[-1] if self._queue else self.current)

    def sweep(self, now: float) -> None:
        """Give up on a client that does not take its response, or does not send what we wait for."""
        if self.backpressure.is_stalled(self.transport, now):
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
        return self._head_is_open or not self._received_bytes

    @property
    def idle_until(self) -> float | None:
        return self._due if self.current is None else None

    def give_way(self) -> None:
        if self._head_is_open:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole while others wait for room")
        self.transport.close()
        self._state.connections.discard(self)


class BodyFraming:
    """What surrounds the bodies of a connection: its size is bounded, and requests to upgrade are ignored."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.replaying = False  # the parser gets the end of a head for the second time, which must have no effect
        self.useful = False  # what was read last contained the end of a head or a part of a body
        self._headers = b""  # that frame the body of the last request, if it requests an upgrade
        self._overhead_bytes = 0  # since something useful was read

    def note_head(self, headers: Sequence[Header]) -> None:
        self.useful = True
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            framing = (b"content-length", b"transfer-encoding")
            self._headers = b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] in framing])

    @property
    def awaits_body(self) -> bool:
        """True while the parser wrongly takes a request for complete: its body is still to come."""
        return bool(self._headers)

    def resume(self) -> None:
        """Let the parser read the body of a request for an upgrade, which it would skip."""
        if self._headers:
            headers, self._headers = self._headers, b""
            self.replaying = True
            self._parser.feed_data(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
            self.replaying = False

    def check_overhead(self, size: int) -> tuple[HTTPStatus, str] | None:
        """Refuse endless trailers and the like, after `size` more bytes that did not end a request."""
        self._overhead_bytes = 0 if self.useful else self._overhead_bytes + size
        self.useful = False
        if self._overhead_bytes <= MAX_HEAD_BYTES:
            return None
        text = f"more than {MAX_HEAD_BYTES} bytes surround the pieces of the body"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text


def check_head(url: bytes, headers: Sequence[Header], received: int) -> tuple[HTTPStatus, str] | None:
    """Refuse a head that is too long; the headers of a short one, `received` bytes in all, need not be added up."""
    if len(url) > MAX_URL_BYTES:
        return HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL is longer than {MAX_URL_BYTES} bytes"
    if len(headers) > MAX_HEADERS or (
        received > MAX_HEAD_BYTES and sum(len(name) + len(value) for name, value in headers) > MAX_HEAD_BYTES
    ):
        text = f"the head has more than {MAX_HEADERS} headers, or {MAX_HEAD_BYTES} bytes of them"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text
    return None


def check_partial_head(size: int) -> tuple[HTTPStatus, str] | None:
    """Refuse a head that is too long before all of it is in memory."""
    if size <= MAX_HEAD_BYTES + MAX_URL_BYTES:
        return None
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes"


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


_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_CONTINUE = _STATUS[100] + b"\r\n"
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LENGTH = b"content-length: %d\r\n"

_encoded_headers: list[Any] = [None, b""]  # the last list of headers, and its bytes


def closing_response(status: HTTPStatus, text: str, headers: bytes) -> bytes:
    """Return a whole response that ends the connection."""
    body = orjson.dumps({"error": text})
    lines = (_STATUS[status], headers, b"content-type: application/json\r\n", _LENGTH % len(body), _CLOSE, b"\r\n")
    return b"".join([*lines, body])
