"""One HTTP/1.1 connection: requests in, in order, within limits; each answer out in one write.

uvicorn runs it in place of its own protocol. It needs no timers, no event and no second copy of the headers.

What stands around the bodies of one connection: how much of it, and upgrades that nobody makes.

The head of an HTTP request: how long it may be, what its target is, and how ASGI tells it.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from serve.http1.exchange import App, Exchange, connection_scope, refusal, stamp_of
from serve.http1.limits import Outflow, make_room
from serve.http1.load_shedding import Gate

HEAD_SECONDS = 10.0  # for a head, from its first byte to its last
BODY_SECONDS = 60.0  # for a body, likewise
_PROBE_SECONDS = 0.02  # after a client's last byte: most requests are answered by then, and need none
_GOODBYE_SECONDS = 2.0  # for a refused client to stop sending: closing on unread bytes would lose the answer


class Connection(asyncio.Protocol):
    """Requests are parsed as they come and answered one after the other."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002  # the signature is uvicorn's
        _loop: asyncio.AbstractEventLoop | None = None,
        refused: Callable[[str], None] = lambda _: None,
        gate: Gate | None = None,
    ) -> None:
        # `_refused` is told the reason of each request that does not reach the application.
        self._refused, self._gate = refused, gate
        self._app: App = config.loaded_app
        self._keep_alive_seconds = config.timeout_keep_alive
        self._most = config.limit_concurrency or sys.maxsize
        self._state = server_state
        self.loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._around = Around(self._parser)
        self.transport: asyncio.Transport
        self._base: dict[str, Any] = {}
        self.current: Exchange | None = None  # the one that is being answered
        self._reading: Exchange | None = None  # the one whose body is still coming
        self._queue: deque[Exchange] = deque()
        self._refusal = b""  # sent when those before it are answered; nothing is read any more
        self._url, self._head_is_open = b"", False
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = self._fed = 0  # of a head in several pieces, those before this one; and this one
        self._due = 0.0  # of the loop's clock: by then the client must have sent what we wait for
        self.outflow = Outflow()
        self._ending = self._read_paused = self._half_closed = self._discarding = False

    # What the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class, only by what it does
        connections: set[Any] = self._state.connections  # uvicorn names its own protocols
        if not make_room(connections, self._most):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{len(connections)} connections are being served already")
        connections.add(self)
        self._base = connection_scope(self.transport)
        self._due = self.loop.time() + self._keep_alive_seconds

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._state.connections.discard(self)
        for exchange in filter(None, (self.current, self._reading)):
            exchange.lose()
        self._queue.clear()
        self.resume_writing()
        if self.current is not None and self.current.task is not None:  # the loop itself holds no reference to it
            self._state.tasks.add(self.current.task)
            self.current.task.add_done_callback(self._state.tasks.discard)

    def data_received(self, data: bytes) -> None:
        if self._refusal:
            return
        if not self._head_bytes and self._reading is None and not self._discarding:
            self._due = self.loop.time() + HEAD_SECONDS
        self._fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:  # to no protocol of ours: go on as if nobody had asked
            self._around.resume()
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
            return
        except httptools.HttpParserError:
            if not self._ended_by_client():
                self._refuse(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
            return
        if self._head_is_open:
            self._head_bytes += len(data)
            if too_long := why_too_long_already(self._head_bytes):
                self._refuse(*too_long)
        elif (self._reading is not None or self._discarding) and (too_long := self._around.why_too_long(len(data))):
            self._refuse(*too_long)

    def eof_received(self) -> bool:
        """The client says no more; whether it still listens is found out. True: it is told something yet."""
        if self._base["scheme"] == "https":  # TLS knows no half
            return False
        self._half_closed = True
        if self._head_is_open or self._reading is not None:
            self._refuse(HTTPStatus.BAD_REQUEST, "the connection was closed for sending in the middle of a request")
            return True
        for exchange in filter(None, (self.current, *self._queue)):
            exchange.half_closed = True
        if self.current is None:
            return False
        self.loop.call_later(_PROBE_SECONDS, self.current.probe)
        return True

    def pause_writing(self) -> None:
        self.outflow.pause()

    def resume_writing(self) -> None:
        self.outflow.resume()

    # What the parser tells

    def on_message_begin(self) -> None:
        self._head_is_open = not self._around.again
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_is_open:  # else it is a trailer, which must not pass for a header
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._refusal or not self._head_is_open:
            return
        self._around.head(self._headers)
        size = self._head_bytes + self._fed
        self._head_is_open, self._head_bytes = False, 0
        if too_long := why_too_long(self._url, self._headers, size):
            self._refuse(*too_long)
            return
        scope, keep_alive = request_scope(self._base, self._parser, self._url, self._headers)
        keep_alive = keep_alive and not self._ending
        if self._gate is not None and self._gate.shut and keep_alive and self._turned_away(self._gate, scope):
            return
        exchange = Exchange(self, scope, keep_alive)
        self._reading = exchange
        if self.current is None:
            self._start(exchange)
        else:  # pipelined: its turn comes
            self._queue.append(exchange)
            self.hold()

    def on_body(self, body: bytes) -> None:
        self._around.body()
        if self._reading is not None:
            self._reading.feed(body)

    def on_message_complete(self) -> None:
        if self._around.upgrading:
            return
        if self._reading is not None:
            self._reading.complete()
            self._reading = None
        elif self._discarding:
            self._discarding = False
            self._due = self.loop.time() + self._keep_alive_seconds

    # What an exchange asks for

    @property
    def stamp(self) -> bytes:
        """The headers that every answer carries."""
        return stamp_of(self._state.default_headers)

    def wait_for_body(self) -> None:
        """The application wants it: read on, and give the client its time."""
        self._due = self.loop.time() + BODY_SECONDS
        self._resume_reading()

    def hold(self) -> None:
        """The application is behind with what was read."""
        if not self._read_paused:
            self._read_paused = True
            self.transport.pause_reading()

    def finished(self, exchange: Exchange) -> None:
        """Answered: the next one, or wait for it."""
        self._state.total_requests += 1
        self.current = None
        if self._refusal and exchange.gone and not self.transport.is_closing():
            self._say_refusal()
        elif not exchange.keep_alive or self.transport.is_closing():
            self.transport.close()
        elif self._queue:
            self._start(self._queue.popleft())
        elif self._refusal:
            self._say_refusal()
        elif self._half_closed:
            self.transport.close()
        else:
            # Answered before its body was read, that is thrown away as it comes.
            self._due = self.loop.time() + (BODY_SECONDS if self._reading is exchange else self._keep_alive_seconds)
            self._resume_reading()

    # What the listener asks for

    def shutdown(self) -> None:
        """uvicorn's word for: answer what was asked, then close."""
        self._ending = True
        if self.current is None:
            self.transport.close()
        else:
            for exchange in (self.current, *self._queue):
                exchange.keep_alive = exchange is not (self._queue[-1] if self._queue else self.current)

    def sweep(self, now: float) -> None:
        """Called now and then: give up on a client that does not take its answer, or send what we wait for."""
        if self.outflow.stuck(self.transport, now):
            self.transport.abort()
            return
        if now < self._due or (self.current is not None and not self.current.waiting_for_body):
            return
        if self.current is None and (self._refusal or not self._head_is_open):
            self.transport.close()
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole in time")

    # What another connection asks for

    @property
    def idle_until(self) -> float | None:
        return self._due if self.current is None else None

    def give_way(self) -> None:
        if self._head_is_open:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive whole while others wait for room")
        self.transport.close()
        self._state.connections.discard(self)

    def _start(self, exchange: Exchange) -> None:
        self.current = exchange
        exchange.start(self._app)

    def _turned_away(self, gate: Gate, scope: dict[str, Any]) -> bool:
        """Answered on its head; of its body nothing is kept."""
        in_turn = self.current is None and not self.outflow.paused
        answer = gate.turned_away(scope, self.stamp, self._fed) if in_turn else None
        if answer is None:
            return False
        self._discarding = True
        self._due = self.loop.time() + BODY_SECONDS
        self.transport.write(answer)
        return True

    def _ended_by_client(self) -> bool:
        """What follows a request that says `connection: close` is nobody's."""
        last = self._queue[-1] if self._queue else self.current
        return last is not None and not last.keep_alive and self._reading is None

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        if self._refusal:
            return
        if self._discarding or (self._reading is not None and self._reading.answered):
            self.transport.close()
            return
        if self._reading is not None:
            self._reading.lose()  # the rest of it never comes
        self._refused(f"http_{status:d}")
        self._refusal = refusal(status, text, self.stamp)
        if self.current is None:
            self._say_refusal()

    def _say_refusal(self) -> None:
        """And listen for a while to a client that is still sending."""
        self.transport.write(self._refusal)
        if self._half_closed:
            self.transport.close()
            return
        self._resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._due = self.loop.time() + _GOODBYE_SECONDS

    def _resume_reading(self) -> None:
        if self._read_paused and not self.transport.is_closing():
            self._read_paused = False
            self.transport.resume_reading()


_GET, _CONNECT = b"GET / HTTP/1.1\r\n", b"CONNECT"


class Around:
    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self.again = False  # the parser is told the end of a head for the second time, and nobody is to know
        self._framing = b""  # how the body of the last request is told from what follows it, where it asks to upgrade
        self._useful = False  # in what was read last there was an end of a head, or some of a body
        self._useless_bytes = 0  # since then

    def head(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """One came to its end."""
        self._useful = True
        if self._parser.should_upgrade() and self._parser.get_method() != _CONNECT:
            framing = (b"content-length", b"transfer-encoding")
            self._framing = b"".join([b"%b: %b\r\n" % pair for pair in headers if pair[0] in framing])

    def body(self) -> None:
        self._useful = True

    @property
    def upgrading(self) -> bool:
        """The parser takes the request for whole, and is wrong: its body is still to come."""
        return bool(self._framing)

    def resume(self) -> None:
        """The parser passes over the body of a request that asks for another protocol; here it is told of it again."""
        if self._framing:
            framing, self._framing = self._framing, b""
            self.again = True
            self._parser.feed_data(_GET + framing + b"\r\n")
            self.again = False

    def why_too_long(self, size: int) -> tuple[HTTPStatus, str] | None:
        """After `size` bytes more that did not end a request: trailers and the like may not go on for ever."""
        self._useless_bytes = 0 if self._useful else self._useless_bytes + size
        self._useful = False
        if self._useless_bytes <= MAX_BYTES:
            return None
        what = f"around the pieces of the body, or behind them, stand more than {MAX_BYTES} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what


MAX_BYTES = 32 << 10
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128

Pairs = Sequence[tuple[bytes, bytes]]


def why_too_long(url: bytes, headers: Pairs, most: int) -> tuple[HTTPStatus, str] | None:
    """`most` bytes were read of it, which spares counting those of a head that is short."""
    if len(url) > MAX_URL_BYTES:
        return HTTPStatus.REQUEST_URI_TOO_LONG, f"the URL is longer than {MAX_URL_BYTES} bytes"
    if len(headers) > MAX_HEADERS or (
        most > MAX_BYTES and sum(len(name) + len(value) for name, value in headers) > MAX_BYTES
    ):
        what = f"the head has more than {MAX_HEADERS} headers, or {MAX_BYTES} bytes of them"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what
    return None


def why_too_long_already(size: int) -> tuple[HTTPStatus, str] | None:
    """A head that is not whole yet is held in memory, so it is bounded before it is."""
    if size <= MAX_BYTES + MAX_URL_BYTES:
        return None
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head of the request is longer than {MAX_BYTES} bytes"


def request_scope(base: Mapping[str, Any], parser: Any, url: bytes, headers: Pairs) -> tuple[dict[str, Any], bool]:
    """`base` is what all requests of the connection have in common. And whether it goes on after this one."""
    path, query = target(url)
    text = path.decode("latin-1")
    scope = {**base}
    scope["method"] = parser.get_method().decode("latin-1")
    scope["path"] = urllib.parse.unquote(text) if "%" in text else text
    scope["raw_path"], scope["query_string"], scope["headers"] = path, query, headers
    if (version := parser.get_http_version()) != "1.1":
        scope["http_version"] = version
        return scope, False
    return scope, parser.should_keep_alive()


def target(url: bytes) -> tuple[bytes, bytes]:
    """The path and the query."""
    if url.startswith(b"/"):
        path, _, query = url.partition(b"?")
        return path, query
    try:  # of a client that takes us for a proxy
        found = httptools.parse_url(url)
    except httptools.HttpParserError:
        return url, b""
    return found.path or b"/", found.query or b""
