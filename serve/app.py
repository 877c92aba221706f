"""The endpoints of the service: each HTTP request from its head to its response; every refusal is a JSON sentence.

`App.begin` sees the head of a request: it checks the key, finds the route and, for a prediction, has `load_shedding`
decide about admission. What is refused there costs neither a task nor a body. The rest happens in `_answer`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from serve.errors import INTERNAL, Busy, DeadlineExceeded, Headers, NotFound, TooLarge
from serve.kinds import TEXT_ROUTES, TEXT_SCHEMAS, text_handlers
from serve.limits import BodyLimits, Budget
from serve.load_shedding import Pauses, admit
from serve.model_version import ModelVersion, Payload
from serve.models import ModelRepository
from serve.monitoring.logs import refusals as refusal_log
from serve.monitoring.prometheus import exposition
from serve.monitoring.request_log import RequestLog
from serve.page import page
from serve.protocol import openai, openapi, v1, v2, v2_json
from serve.protocol.statistics import statistics
from serve.request_body import parse_object, read_body
from serve.request_context import HttpRequest, in_flight
from serve.routes import (
    Handler,
    Response,
    Route,
    Stream,
    check_content_type,
    find_route,
    json_response,
    media_type,
    needs_no_key,
)
from serve.sampling import Sampler
from serve.security import ApiKeys
from serve.wire.connection_limits import LINGER_SECONDS

PROTOCOLS = {"predict": "v1", "infer": "v2", **dict.fromkeys(TEXT_ROUTES, "openai")}
_LENGTH = v2.LENGTH_HEADER.encode()
_BINARY = (b"content-type", b"application/octet-stream")
_NO_ROUTE = Route("", ())
_INDEX_LIMITS = BodyLimits(4096)  # of a request with a single field
_REFUSALS_PER_TURN = 256  # of the event loop, at once: clients ask again, and the loop would do nothing else

log = logging.getLogger(__name__)


class App:
    """The application of the public HTTP port."""

    request_class = HttpRequest

    def __init__(
        self,
        repository: ModelRepository,
        requests: RequestLog,
        keys: ApiKeys | None = None,
        *,
        page: bool = True,
        budget: Budget | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.repository, self.requests, self.keys, self.page = repository, requests, keys, page
        self._sampler = sampler if sampler is not None and sampler.takes_labels else None
        self.budget = budget or Budget()
        self._pauses = Pauses()
        repository.on_readiness(self._pauses.end_all)  # when the service drains
        self._refusals = 0  # written at once, in this turn of the event loop
        self._handlers: dict[str, Handler] = {
            "root": self._root,
            "page_counters": self._page_counters,
            "metrics": self._metrics,
            "openapi": self._openapi,
            "v1_models": self._models,
            "v1_model": self._model_ready,
            "server": self._server,
            "live": self._live,
            "ready": self._ready,
            "models": self._models,
            "model": self._model,
            "model_ready": self._model_ready,
            "index": self._index,
            "statistics": self._statistics,
            "model_statistics": self._statistics,
            "feedback": self._feedback,
            **text_handlers(repository, self.budget),
        }

    # One request

    def begin(self, request: HttpRequest) -> Coroutine[Any, Any, None] | None:
        """Refuse a request by its head, at once where possible, or return the coroutine that answers it."""
        route = _NO_ROUTE
        try:
            path, method = request.path, request.method
            if self.keys is not None and not needs_no_key(path, method):
                self.keys.check(request.headers)
            route = find_route(path, method)
            if (protocol := PROTOCOLS.get(route.kind)) is not None:
                request.protocol = protocol
                in_flight.count += 1  # until RequestLog.finish
            handler = self._handlers.get(route.kind)
            if handler is not None:  # all routes but predict and infer
                return self._answer(request, route, handler(request, route))
            version = self.repository.find_version(route.model, route.version)
            request.model_version = version
            given = request.headers.get(b"content-type")
            if given is not None and given != b"application/json" and not _is_raw(given, request, route):
                check_content_type(given, "application/json", *_other_types(request, route, version))
            admit(request, version)
        except Exception as error:
            response = self._failure(request, error)
            if self._refusals >= _REFUSALS_PER_TURN or not request.is_writable:
                return self._answer(request, route, _as_coroutine(response))
            if not self._refusals:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._refusals += 1
            request.status = response.status
            request.respond_now(response.status, self._headers(request, route, response.headers), response.body)
            if isinstance(error, Busy | DeadlineExceeded) and not self.repository.draining:
                self._pauses.add(request.pause())
            self.requests.finish(request)
            return None
        version.unstarted += 1
        predict = self._predict if route.kind == "predict" else self._infer
        return self._answer(request, route, predict(request, route, version))

    def _next_turn(self) -> None:
        self._refusals = 0

    async def _answer(self, request: HttpRequest, route: Route, endpoint: Awaitable[Response | Stream]) -> None:
        try:
            more = False  # of a body that is too large is still to come
            try:
                answer = await endpoint
            except Exception as error:
                answer = self._failure(request, error)
                more = isinstance(error, TooLarge) and error.more
            if isinstance(answer, Stream):
                await self._send_stream(request, route, answer)
                return
            request.status = answer.status
            headers = self._headers(request, route, answer.headers)
            if not more:
                await request.respond(answer.status, headers, answer.body)
                return
            # Closing on unread bytes would reset the connection and lose the response.
            await request.respond(answer.status, [*headers, (b"connection", b"close")], answer.body)
            try:
                async with asyncio.timeout(LINGER_SECONDS):
                    await request.discard_body()
            except TimeoutError:
                if refusal_log.allows():
                    log.info("a client did not stop sending a body that was refused; closing its connection")
        finally:
            if request.held_bytes:
                self.budget.release(request)
            self.requests.finish(request)

    async def _send_stream(self, request: HttpRequest, route: Route, stream: Stream) -> None:
        """Send each part as it comes; a failure can only be reported in the body, as the status has been sent."""
        request.status = HTTPStatus.OK
        request.start_stream(HTTPStatus.OK, self._headers(request, route, stream.headers))
        try:
            async with aclosing(stream.parts) as parts:
                async for part in parts:
                    await request.send_part(part)
        except Exception as error:
            refusal = self.requests.fail(request, error)
            request.status = HTTPStatus.INTERNAL_SERVER_ERROR if refusal is None else refusal.status
            await request.send_part(stream.failure(refusal))
        request.end_stream()

    def _failure(self, request: HttpRequest, error: Exception) -> Response:
        refusal = self.requests.fail(request, error)
        self.budget.charge_refused(request, refusal)
        if request.path.startswith(openai.PREFIX):
            body = openai.error_body(refusal)
        else:
            body = {"error": INTERNAL if refusal is None else str(refusal)}
        if refusal is None:
            return json_response(body, HTTPStatus.INTERNAL_SERVER_ERROR)
        return json_response(body, refusal.status, refusal.headers)

    def _headers(self, request: HttpRequest, route: Route, headers: Headers) -> Headers:
        """Add the request id, the bundle, and while draining that the next request needs a new connection."""
        version = request.model_version
        bundle = self.repository.identity(route.model, route.version) if version is None else version.headers
        closing = ((b"connection", b"close"),) if self.repository.draining else ()
        return (*headers, (b"x-request-id", request.id), *bundle, *closing)

    # Predictions

    async def _predict(self, request: HttpRequest, route: Route, version: ModelVersion) -> Response:
        version.unstarted -= 1
        given = request.headers.get(b"content-type")
        is_file = given is not None and media_type(given) in version.predictor.media_types
        body = await read_body(request, version.predict_limits, self.budget, 0 if is_file else math.inf)
        payload = v1.Payload(body, is_file)
        if version.canary is not None and not route.version:
            version = await _choose(request, version, payload)
        return Response(await version.predict(request, payload))

    async def _infer(self, request: HttpRequest, route: Route, version: ModelVersion) -> Response:
        version.unstarted -= 1
        length = request.headers.get(_LENGTH)
        header = None if length is None else length.decode("latin-1")
        json_bytes = math.inf if header is None else v2.json_bytes(header)
        body = await read_body(request, version.infer_limits, self.budget, json_bytes)
        payload = v2.Payload(version.name, body, header, version.predictor.signature)
        if version.canary is not None and not route.version:
            version = await _choose(request, version, payload)
        answer = await version.predict(request, payload)
        if answer.json_bytes is None:
            return Response(answer.body)
        return Response(answer.body, (_BINARY, (_LENGTH, b"%d" % answer.json_bytes)))

    # Everything else

    async def _root(self, request: HttpRequest, _: Route) -> Response:
        """Return a page for browsers, and a sign of life for clients that do not accept HTML."""
        is_browser = b"text/html" in request.headers.get(b"accept", b"")  # probes and scripts do not accept it by name
        if not (self.page and self.repository.names and is_browser):
            return json_response({"status": "alive"}, headers=((b"vary", b"accept"),))
        shown = page.PageModel.of(self.repository, request.query)
        return Response(await asyncio.to_thread(page.render, shown), page.headers())

    async def _page_counters(self, _request: HttpRequest, _: Route) -> Response:
        if not self.page:
            raise NotFound("/page.json: the page is off (serve.page: false); /metrics has the counters")
        body = page.counters(await self.requests.metrics.of_service(), ready=self.repository.ready())
        return json_response(body, headers=((b"cache-control", b"no-store"),))

    async def _live(self, _request: HttpRequest, _: Route) -> Response:
        return json_response({"live": True})

    async def _ready(self, _request: HttpRequest, _: Route) -> Response:
        ready = self.repository.ready()
        return _health({"ready": ready, "live": ready})  # the protocol's text and its OpenAPI name it differently

    async def _server(self, _request: HttpRequest, _: Route) -> Response:
        return json_response(self.repository.metadata())

    async def _models(self, _request: HttpRequest, _: Route) -> Response:
        return json_response({"models": self.repository.names})

    async def _model(self, _request: HttpRequest, route: Route) -> Response:
        return json_response(self.repository.model_metadata(route.model, route.version))

    async def _model_ready(self, _request: HttpRequest, route: Route) -> Response:
        self.repository.find_version(route.model, route.version)
        return _health({"name": route.model, "ready": self.repository.model_ready(route.model)})

    async def _index(self, request: HttpRequest, _: Route) -> Response:
        body = await read_body(request, _INDEX_LIMITS, self.budget)
        ready = bool(body.strip()) and v2_json.index_is_ready_only(parse_object(body))
        return json_response(self.repository.index(ready=ready))

    async def _feedback(self, request: HttpRequest, _: Route) -> Response:
        if self._sampler is None:
            raise NotFound("/feedback: this service takes no labels (serve.sample: 0, or no serve.sample_to)")
        check_content_type(request.headers.get(b"content-type"), "application/json")
        sizes = [version.predict_limits.size for version, _ in self.repository.loaded_versions()]
        await self._sampler.store_label(await read_body(request, _INDEX_LIMITS._replace(size=max(sizes)), self.budget))
        return json_response({"stored": True})

    async def _statistics(self, _request: HttpRequest, route: Route) -> Response:
        chosen = self.repository.find_versions(route.model, route.version)
        return json_response({"model_stats": statistics(await self.requests.metrics.of_service(), chosen)})

    async def _openapi(self, _request: HttpRequest, _: Route) -> Response:
        version = self.repository.find_version(self.repository.names[0]).digest[:12]
        await asyncio.to_thread(_read_examples, [one for one, _ in self.repository.loaded_versions()])
        return json_response(
            openapi.document(
                self.repository, version, TEXT_SCHEMAS, keys=self.keys is not None, labels=self._sampler is not None
            )
        )

    async def _metrics(self, request: HttpRequest, _: Route) -> Response:
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        body, content_type = exposition(await self.requests.metrics.of_service(), accept)
        return Response(body, ((b"content-type", content_type.encode()),))


def _is_raw(content_type: bytes, request: HttpRequest, route: Route) -> bool:
    """Return True for raw tensors behind JSON, the most common of the other types."""
    return content_type == _BINARY[1] and route.kind == "infer" and _LENGTH in request.headers


def _other_types(request: HttpRequest, route: Route, version: ModelVersion) -> tuple[str, ...]:
    """Return the types of bodies besides JSON: files that the codec takes, and raw tensors behind JSON."""
    if route.kind == "predict":
        return version.predictor.media_types
    return ("application/octet-stream",) if _LENGTH in request.headers else ()


async def _choose(request: HttpRequest, version: ModelVersion, payload: Payload) -> ModelVersion:
    """Choose between a version and its canary; the canary has its own queue, so admission is checked for it."""
    chosen = await version.choose(payload, request.id)
    if chosen is not version:
        request.model_version = chosen
        admit(request, chosen)
    return chosen


def _read_examples(versions: Sequence[ModelVersion]) -> None:
    """Read the examples, which are kept: not on the event loop, since they are in files."""
    for version in versions:
        _ = version.examples


async def _as_coroutine(response: Response) -> Response:
    return response


def _health(body: dict[str, Any]) -> Response:
    return json_response(body, HTTPStatus.OK if body["ready"] else HTTPStatus.SERVICE_UNAVAILABLE)
