"""The HTTP side: one request from its route to its answer; every refusal a JSON sentence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from serve import form, openapi, page, page_data, v1, v2
from serve.batcher import stays
from serve.body import Room, linger, read
from serve.canary import choose
from serve.deadline import of_header
from serve.gate import PROTOCOLS, Gate
from serve.jsonobject import parse_object
from serve.keys import Keys
from serve.model import OnnxPlane
from serve.observer import Observer
from serve.refusal import Busy, Headers, Refusal, TooLarge, Unknown, Unreadable
from serve.routes import Route, find, is_open
from serve.watch import Watch

INTERNAL = "internal error; the server's log has the details"
_JSON = (b"content-type", b"application/json")
_LENGTH = v2.LENGTH_HEADER.encode()
_BINARY = (b"content-type", b"application/octet-stream")
_CURL = "application/x-www-form-urlencoded"  # what `curl -d` says of any body unless told otherwise: read as JSON
_NOWHERE = Route("", ())
_INDEX_BYTES = 4096  # of a question that has one word

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    headers: Headers = (_JSON,)
    status: int = 200


@dataclass(slots=True)
class Asked:
    """One request as the endpoints see it."""

    route: Route
    headers: dict[bytes, bytes]
    scope: Scope
    receive: Receive
    watch: Watch
    room: Room
    held: int = 0  # bytes of its body

    @property
    def gone(self) -> Callable[[], bool]:
        return self.scope.get("left", stays)  # type: ignore[no-any-return]

    @property
    def alone(self) -> bool:
        return "alone" in self.scope and self.scope["alone"]()

    def hold(self, size: int, most: int) -> None:
        self.room.take(size, most)
        self.held += size


class App:
    """An ASGI application: nothing between the server and the endpoints but what every request needs."""

    def __init__(self, plane: OnnxPlane, observer: Observer, keys: Keys | None = None, *, page: bool = True) -> None:
        self.plane, self.observer, self.keys, self.page = plane, observer, keys, page
        self.room, self.gate = Room(), Gate(plane, observer, keys)
        self._ends: dict[str, Callable[[Asked], Awaitable[Answer]]] = {
            "root": self._root,
            "page_counters": self._page_counters,
            "metrics": self._metrics,
            "openapi": self._openapi,
            "v1_models": self._models,
            "v1_model": self._model_ready,
            "predict": self._predict,
            "server": self._server,
            "live": self._live,
            "ready": self._ready,
            "models": self._models,
            "model": self._model,
            "model_ready": self._model_ready,
            "infer": self._infer,
            "index": self._index,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (coming := scope.get("coming")) is not None:
            coming.coming -= 1
        headers = dict(scope["headers"])
        watch = self.observer.begin(headers, scope["path"])
        asked = Asked(_NOWHERE, headers, scope, receive, watch, self.room)
        try:
            await self._exchange(asked, send)
        finally:
            self.room.held -= asked.held
            self.observer.ended(watch)

    async def _exchange(self, asked: Asked, send: Send) -> None:
        try:
            if self.keys is not None and not is_open(asked.scope["path"], asked.scope["method"]):
                self.keys.admit(asked.headers)
            route = asked.route = find(asked.scope["path"], asked.scope["method"])
            if (protocol := PROTOCOLS.get(route.kind)) is not None:
                self.observer.asked(asked.watch, protocol)
            answer = await self._ends[route.kind](asked)
        except Exception as error:
            answer = self._failed(asked, error)
            if isinstance(error, TooLarge) and error.more:
                asked.watch.code = answer.status
                await linger(asked.receive, send, answer, self._identity(asked), more=error.more)
                return
        await self._send(send, answer, asked)

    def _failed(self, asked: Asked, error: Exception) -> Answer:
        if isinstance(error, Busy):
            self.gate.refused()
        if (refusal := self.observer.failed(asked.watch, error)) is not None:
            return refused(refusal)
        return Answer(orjson.dumps({"error": INTERNAL}), status=HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _send(self, send: Send, answer: Answer, asked: Asked) -> None:
        asked.watch.code = answer.status
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body)), *self._identity(asked)]
        if self.plane.draining:  # the client's next request belongs to another process
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    def _identity(self, asked: Asked) -> Headers:
        """Which request this is, and which bundle answers it."""
        served = asked.watch.served
        bundle = self.plane.identity(asked.route.model, asked.route.version) if served is None else served.headers
        return ((b"x-request-id", asked.watch.id), *bundle)

    async def _predict(self, asked: Asked) -> Answer:
        check_content(asked.headers, "application/json")
        served = asked.watch.served = self.plane.served(asked.route.model, asked.route.version)
        timeout_seconds = of_header(asked.headers)
        served.admit(timeout_seconds)
        call = v1.Call(await read(asked.headers, asked.receive, served.max_body_bytes, asked.hold))
        if served.canary is not None and not asked.route.version:
            served = asked.watch.served = await choose(served, call, asked.watch.id)
        return Answer(await served.answer(call, timeout_seconds, asked.gone, asked.watch, asked.alone))

    async def _infer(self, asked: Asked) -> Answer:
        length = asked.headers.get(_LENGTH)
        check_content(asked.headers, "application/json", *([] if length is None else ["application/octet-stream"]))
        served = asked.watch.served = self.plane.served(asked.route.model, asked.route.version)
        timeout_seconds = of_header(asked.headers)
        served.admit(timeout_seconds)
        body = await read(asked.headers, asked.receive, served.max_body_bytes, asked.hold)
        call = v2.Call(served.name, body, None if length is None else length.decode("latin-1"))
        if served.canary is not None and not asked.route.version:
            served = asked.watch.served = await choose(served, call, asked.watch.id)
        answer = await served.answer(call, timeout_seconds, asked.gone, asked.watch, asked.alone)
        if answer.json_bytes is None:
            return Answer(answer.body)
        said = (_LENGTH, b"%d" % answer.json_bytes)
        return Answer(answer.body, (_BINARY, said))

    async def _root(self, asked: Asked) -> Answer:
        """A page for people; for whoever does not ask for HTML, a sign of life."""
        if not self.page or not self.plane.names or not page.wanted(asked.headers.get(b"accept", b"")):
            return json_answer({"status": "alive"}, headers=((b"vary", b"accept"),))
        shown = page.Shown.of(self.plane, asked.scope["query_string"])
        return Answer(await asyncio.to_thread(page.render, shown), page.headers())

    async def _page_counters(self, _: Asked) -> Answer:
        if not self.page:
            raise Unknown("/page.json: the page is off (serve.page: false); /metrics has the counters")
        return json_answer(
            page_data.counters(list(self.plane.loaded()), ready=await self.plane.ready()),
            headers=((b"cache-control", b"no-store"),),
        )

    async def _live(self, _: Asked) -> Answer:
        return json_answer({"live": True})

    async def _ready(self, _: Asked) -> Answer:
        ready = await self.plane.ready()
        return _health({"ready": ready, "live": ready})  # the protocol's text and its OpenAPI name it differently

    async def _server(self, _: Asked) -> Answer:
        return json_answer(self.plane.metadata())

    async def _models(self, _: Asked) -> Answer:
        return json_answer({"models": self.plane.names})

    async def _model(self, asked: Asked) -> Answer:
        return json_answer(await self.plane.model_metadata(asked.route.model, asked.route.version))

    async def _model_ready(self, asked: Asked) -> Answer:
        self.plane.served(asked.route.model, asked.route.version)
        return _health({"name": asked.route.model, "ready": await self.plane.model_ready(asked.route.model)})

    async def _index(self, asked: Asked) -> Answer:
        body = await read(asked.headers, asked.receive, _INDEX_BYTES)
        if body:
            form.check_index(parse_object(body))
        return json_answer(self.plane.index())

    async def _openapi(self, _: Asked) -> Answer:
        version = self.plane.served(self.plane.names[0]).bundle.digest[:12]
        return json_answer(openapi.document(self.plane, version, keys=self.keys is not None))

    async def _metrics(self, asked: Asked) -> Answer:
        accept = asked.headers.get(b"accept", b"").decode("latin-1")
        body, content_type = self.observer.metrics.text(accept)
        return Answer(body, ((b"content-type", content_type.encode()),))


def json_answer(body: Any, status: int = 200, headers: Headers = ()) -> Answer:
    return Answer(orjson.dumps(body), (_JSON, *headers), status)


def refused(refusal: Refusal) -> Answer:
    return json_answer({"error": str(refusal)}, refusal.status, refusal.headers)


def check_content(headers: dict[bytes, bytes], *accepted: str) -> None:
    """What we cannot read is refused, not guessed at; no type at all is taken for JSON."""
    given = headers.get(b"content-type")
    if given is None or given == b"application/json":
        return
    found = given.decode("latin-1")
    kind, _, parameters = found.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() not in (*accepted, _CURL) or charset not in ("", "utf-8"):
        raise Unreadable(f"content-type: {found[:200]!r} given, send {' or '.join(accepted)}")


def _health(body: dict[str, Any]) -> Answer:
    return json_answer(body, HTTPStatus.OK if body["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)
