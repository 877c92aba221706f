"""The HTTP side: one request from its route to its answer; every refusal a JSON sentence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send

from serve.canary import choose
from serve.errors import Busy, Headers, TooLarge, Unknown
from serve.generate import openai_api
from serve.generate.endpoints import TEXT, Texts
from serve.http1.load_shedding import PROTOCOLS, Gate
from serve.models import OnnxPlane
from serve.page import page
from serve.protocol import openapi, v1, v2, v2_json
from serve.protocol.v2_json import parse_object
from serve.request_body import Room, linger, of_header, read
from serve.request_log import Observer
from serve.routes import Answer, Asked, Flow, Route, check_content, find, is_open, json_answer
from serve.security import Keys

INTERNAL = "internal error; the server's log has the details"
_LENGTH = v2.LENGTH_HEADER.encode()
_BINARY = (b"content-type", b"application/octet-stream")
_NOWHERE = Route("", ())
_PROTOCOLS = {**PROTOCOLS, **dict.fromkeys(TEXT, "openai")}
_INDEX_BYTES = 4096  # of a question that has one word

log = logging.getLogger(__name__)


class App:
    """An ASGI application: nothing between the server and the endpoints but what every request needs."""

    def __init__(self, plane: OnnxPlane, observer: Observer, keys: Keys | None = None, *, page: bool = True) -> None:
        self.plane, self.observer, self.keys, self.page = plane, observer, keys, page
        self.room, self.gate = Room(), Gate(plane, observer, keys)
        texts = Texts(plane)
        self._ends: dict[str, Callable[[Asked], Awaitable[Answer | Flow]]] = {
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
            "texts_models": texts.models,
            "texts_model": texts.model,
            "completions": texts.complete,
            "chat": texts.chat,
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
            if (protocol := _PROTOCOLS.get(route.kind)) is not None:
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
        refusal = self.observer.failed(asked.watch, error)
        if asked.scope["path"].startswith(openai_api.PREFIX):
            told = openai_api.failure(refusal)
        else:
            told = {"error": INTERNAL if refusal is None else str(refusal)}
        if refusal is None:
            return json_answer(told, HTTPStatus.INTERNAL_SERVER_ERROR)
        return json_answer(told, refusal.status, refusal.headers)

    async def _send(self, send: Send, answer: Answer | Flow, asked: Asked) -> None:
        if isinstance(answer, Flow):
            await self._stream(send, answer, asked)
            return
        asked.watch.code = answer.status
        length = (b"content-length", b"%d" % len(answer.body))
        headers = [*answer.headers, length, *self._identity(asked), *self._parting()]
        await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _stream(self, send: Send, flow: Flow, asked: Asked) -> None:
        """Each part as it comes. What fails under way can only be told in the body: the status is out already."""
        asked.watch.code = HTTPStatus.OK
        headers = [*flow.headers, *self._identity(asked), *self._parting()]
        await send({"type": "http.response.start", "status": int(HTTPStatus.OK), "headers": headers})
        try:
            async with aclosing(flow.parts) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
        except Exception as error:
            refusal = self.observer.failed(asked.watch, error)
            asked.watch.code = HTTPStatus.INTERNAL_SERVER_ERROR if refusal is None else refusal.status
            await send({"type": "http.response.body", "body": flow.failure(refusal), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _parting(self) -> Headers:
        """While draining: the client's next request belongs to another process."""
        return ((b"connection", b"close"),) if self.plane.draining else ()

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
            page.counters(list(self.plane.loaded()), ready=await self.plane.ready()),
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
            v2_json.check_index(parse_object(body))
        return json_answer(self.plane.index())

    async def _openapi(self, _: Asked) -> Answer:
        version = self.plane.served(self.plane.names[0]).bundle.digest[:12]
        return json_answer(openapi.document(self.plane, version, keys=self.keys is not None))

    async def _metrics(self, asked: Asked) -> Answer:
        accept = asked.headers.get(b"accept", b"").decode("latin-1")
        body, content_type = self.observer.metrics.text(accept)
        return Answer(body, ((b"content-type", content_type.encode()),))


def _health(body: dict[str, Any]) -> Answer:
    return json_answer(body, HTTPStatus.OK if body["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)
