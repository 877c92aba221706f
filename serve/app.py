"""The HTTP routes: health, metadata, metrics, and predictions by either protocol; every refusal a JSON sentence."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from kserve.errors import ModelNotFound
from kserve.protocol.rest.server import metrics_handler
from starlette.exceptions import HTTPException

from pipeline.spec.errors import InvalidPayload
from serve import openapi, v1, v2
from serve.middleware import INTERNAL
from serve.model import Call, OnnxPlane

_CURL = "application/x-www-form-urlencoded"  # what `curl -d` says of any body unless told otherwise: read as JSON


class Endpoints:
    def __init__(self, plane: OnnxPlane) -> None:
        self.plane = plane

    async def live(self) -> dict[str, Any]:
        return {"status": "alive"}

    async def server_live(self) -> dict[str, Any]:
        return {"live": True}

    async def server_ready(self) -> Response:
        ready = await self.plane.ready()
        return _health({"ready": ready, "live": ready})  # the protocol's text and its OpenAPI name it differently

    async def server_metadata(self) -> dict[str, Any]:
        return self.plane.metadata()

    async def models(self) -> dict[str, list[str]]:
        return {"models": list(self.plane.model_registry.get_models())}

    async def model_metadata(self, model_name: str) -> dict[str, Any]:
        return await self.plane.model_metadata(model_name)

    async def model_ready(self, model_name: str) -> Response:
        return _health({"name": model_name, "ready": await self.plane.model_ready(model_name)})

    async def predict(self, model_name: str, request: Request) -> Response:
        _check_content(request, "application/json")
        body = await self._answer(model_name, v1.Call(await request.body()))
        return Response(body, media_type="application/json")

    async def infer(self, model_name: str, request: Request) -> Response:
        length = request.headers.get(v2.LENGTH_HEADER)
        _check_content(request, "application/json", *([] if length is None else ["application/octet-stream"]))
        answer = await self._answer(model_name, v2.Call(model_name, await request.body(), length))
        if answer.json_bytes is None:
            return Response(answer.body, media_type="application/json")
        headers = {v2.LENGTH_HEADER: str(answer.json_bytes)}
        return Response(answer.body, media_type="application/octet-stream", headers=headers)

    async def _answer(self, model_name: str, call: Call) -> Any:
        return await self.plane.predict(model_name, call)


def build(plane: OnnxPlane, *, title: str, version: str) -> FastAPI:
    app = FastAPI(title=title, version=version, docs_url=None, redoc_url=None)
    _add_routes(app, Endpoints(plane))
    app.add_exception_handler(InvalidPayload, _refused)
    app.add_exception_handler(ModelNotFound, _not_found)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    return app


def _add_routes(app: FastAPI, ends: Endpoints) -> None:
    get: dict[str, Any] = {
        "/": ends.live,
        "/metrics": metrics_handler,
        "/v1/models": ends.models,
        "/v1/models/{model_name}": ends.model_ready,
        "/v2": ends.server_metadata,
        "/v2/health/live": ends.server_live,
        "/v2/health/ready": ends.server_ready,
        "/v2/models": ends.models,
        "/v2/models/{model_name}": ends.model_metadata,
        "/v2/models/{model_name}/ready": ends.model_ready,
    }
    for path, endpoint in get.items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    for path, endpoint, extra in (
        ("/v1/models/{model_name}:predict", ends.predict, openapi.predict()),
        ("/v2/models/{model_name}/infer", ends.infer, openapi.infer()),
    ):
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None, openapi_extra=extra)


def _check_content(request: Request, *accepted: str) -> None:
    """What we cannot read is refused, not guessed at; no type at all is taken for JSON."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-encoding: {coding!r} is not supported")
    kind, _, parameters = request.headers.get("content-type", accepted[0]).partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() not in (*accepted, _CURL) or charset not in ("", "utf-8"):
        found = request.headers["content-type"]
        raise HTTPException(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content-type: {found!r} given, send {' or '.join(accepted)}"
        )


def _health(body: dict[str, Any]) -> Response:
    return _json(HTTPStatus.OK if body["ready"] else HTTPStatus.SERVICE_UNAVAILABLE, body)


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    return _json(HTTPStatus.BAD_REQUEST, {"error": str(error)})


async def _not_found(_: Request, error: Exception) -> Response:
    return _json(HTTPStatus.NOT_FOUND, {"error": str(error)})


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = error.detail
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        text = f"{request.method} {request.url.path}: {text.lower()}; /openapi.json lists what there is"
    return _json(error.status_code, {"error": text}, dict(error.headers or {}))


async def _failed(_: Request, __: Exception) -> Response:
    """Opaque: starlette raises the error again after this answer, and the envelope logs it."""
    return _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": INTERNAL})
