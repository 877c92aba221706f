"""The HTTP side: one request from its route to its answer; every refusal a JSON sentence."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from kserve.protocol.rest.server import metrics_handler
from starlette.types import Receive, Scope, Send

from serve import openapi, v1, v2
from serve.body import Gone, linger, read
from serve.metrics import Metrics, Outcome
from serve.model import OnnxPlane
from serve.refusal import Headers, Refusal, TooLarge, Unreadable, refusal_of
from serve.routes import Route, find

INTERNAL = "internal error; the server's log has the details"
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_CURL = "application/x-www-form-urlencoded"  # what `curl -d` says of any body unless told otherwise: read as JSON
_PROTOCOLS = {"predict": "v1", "infer": "v2"}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    headers: Headers = (_JSON,)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the endpoints see it."""

    route: Route
    headers: dict[bytes, bytes]
    scope: Scope
    receive: Receive


class App:
    """An ASGI application: nothing between the server and the endpoints but what every request needs."""

    def __init__(self, plane: OnnxPlane, metrics: Metrics, max_body_bytes: int, version: str) -> None:
        self.plane, self.metrics, self.max_body_bytes, self.version = plane, metrics, max_body_bytes, version
        self._ends: dict[str, Callable[[Asked], Awaitable[Answer]]] = {
            "root": self._root,
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
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            route = find(scope["path"], scope["method"])
        except Refusal as refusal:
            await self._send(send, refused(refusal), Outcome(), "", "")
            return
        asked = Asked(route, dict(scope["headers"]), scope, receive)
        if (protocol := _PROTOCOLS.get(route.kind)) is None:
            await self._exchange(asked, send, Outcome())
        else:
            with self.metrics.request(protocol) as outcome:
                await self._exchange(asked, send, outcome)

    async def _exchange(self, asked: Asked, send: Send, outcome: Outcome) -> None:
        try:
            answer = await self._ends[asked.route.kind](asked)
        except Gone:
            return
        except Exception as error:
            if isinstance(error, TooLarge):
                outcome.code = str(int(error.status))
                identity = self.plane.identity(asked.route.model, asked.route.version)
                await linger(asked.receive, send, refused(error), identity, more=error.more)
                return
            answer = self._failed(asked, error)
        await self._send(send, answer, outcome, asked.route.model, asked.route.version)

    def _failed(self, asked: Asked, error: Exception) -> Answer:
        if (refusal := refusal_of(error)) is not None:
            return refused(refusal)
        log.error("%s %s failed", asked.scope["method"], asked.scope["path"], exc_info=error)
        return Answer(orjson.dumps({"error": INTERNAL}), status=HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _send(self, send: Send, answer: Answer, outcome: Outcome, model: str, version: str) -> None:
        outcome.code = str(int(answer.status))
        headers = [*answer.headers, (b"content-length", b"%d" % len(answer.body)), *self.plane.identity(model, version)]
        if self.plane.draining:  # the client's next request belongs to another process
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": int(answer.status), "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _predict(self, asked: Asked) -> Answer:
        check_content(asked.headers, "application/json")
        served = self.plane.served(asked.route.model, asked.route.version)
        body = await read(asked.headers, asked.receive, self.max_body_bytes)
        return Answer(await served.answer(v1.Call(body)))

    async def _infer(self, asked: Asked) -> Answer:
        length = asked.headers.get(v2.LENGTH_HEADER.encode())
        check_content(asked.headers, "application/json", *([] if length is None else ["application/octet-stream"]))
        served = self.plane.served(asked.route.model, asked.route.version)
        body = await read(asked.headers, asked.receive, self.max_body_bytes)
        text = None if length is None else length.decode("latin-1")
        answer = await served.answer(v2.Call(served.name, body, text, served.version))
        if answer.json_bytes is None:
            return Answer(answer.body)
        said = (v2.LENGTH_HEADER.encode(), b"%d" % answer.json_bytes)
        return Answer(answer.body, (_BINARY, said))

    async def _root(self, _: Asked) -> Answer:
        return json_answer({"status": "alive"})

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

    async def _openapi(self, _: Asked) -> Answer:
        return json_answer(openapi.document(self.plane.names[0], self.version))

    async def _metrics(self, asked: Asked) -> Answer:
        from starlette.requests import Request

        found = await metrics_handler(Request(asked.scope, asked.receive))
        return Answer(
            bytes(found.body), tuple((key, value) for key, value in found.raw_headers if key != b"content-length")
        )


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
