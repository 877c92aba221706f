"""The admin interface: load a bundle, switch to it, run it as a canary or a shadow. Never on the public port."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson

from pipeline.system.errors import InvalidPayload, PipelineError
from serve.errors import ClientDisconnected, Headers, MethodNotAllowed, NotFound, RequestError, Unauthorized
from serve.http1.connection import HttpRequest
from serve.memory import MemoryBudget
from serve.models import ModelManager
from serve.monitoring.logs import log_fields
from serve.request_body import parse_object, read_body
from serve.security import is_token

_MAX_BODY_BYTES = 64 << 10

log = logging.getLogger(__name__)

Fields = Mapping[str, Any]
Reply = tuple[int, Headers, Any]  # status, headers and the object in the body

STATUS = "/"
CHANGES = ("/load", "/switch", "/canary", "/shadow", "/forget")


class Admin:
    """The application of the admin port: `GET /` returns the status, `POST /<what>` changes it; both need the token."""

    def __init__(self, perform: Callable[[str, Fields], Awaitable[Reply]], token: str) -> None:
        self._perform, self._token = perform, token
        self._budget = MemoryBudget()

    def begin(self, request: HttpRequest) -> Coroutine[Any, Any, None]:
        return self._respond(request)

    async def _respond(self, request: HttpRequest) -> None:
        try:
            status, headers, body = await self._perform(request.path, await self._read(request))
        except ClientDisconnected:
            return
        except Exception as error:
            status, headers, body = _failure(error, request.path)
        finally:
            self._budget.release(request)
        headers = ((b"content-type", b"application/json"), *headers, (b"x-request-id", request.id))
        await request.respond(status, headers, orjson.dumps(body))

    async def _read(self, request: HttpRequest) -> Fields:
        """Check the request and return the fields of its body."""
        if not is_token(request.headers.get(b"authorization", b""), self._token):
            raise Unauthorized("the admin interface needs its token: authorization: Bearer …")
        path, method = request.path, request.method
        if path != STATUS and path not in CHANGES:
            raise NotFound(f"{path[:200]}: not found; there are {STATUS}, {', '.join(CHANGES)}")
        if method != (allowed := "GET" if path == STATUS else "POST"):
            raise MethodNotAllowed(f"{method[:16]} {path}: only {allowed}", allowed)
        if path == STATUS:
            return {}
        return parse_object(await read_body(request, _MAX_BODY_BYTES, self._budget))


class ModelChanges:
    """What the admin interface can do with the models of this process; belongs to their event loop."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager
        self._changes: dict[str, Callable[[Fields], Awaitable[Any]]] = {
            "/load": self._load,
            "/switch": self._switch,
            "/canary": self._canary,
            "/shadow": self._shadow,
            "/forget": self._forget,
        }

    async def perform(self, path: str, fields: Fields) -> Reply:
        """Return the status of the models, or change them."""
        try:
            body = self._manager.status() if path == STATUS else await self._changes[path](fields)
        except Exception as error:
            return _failure(error, path)
        return HTTPStatus.OK, (), body

    async def _load(self, fields: Fields) -> Any:
        served = await self._manager.load(_text(fields, "model"), _folder(fields))
        return {"version": served.version, "bundle": served.bundle.digest}

    async def _switch(self, fields: Fields) -> Any:
        served = self._manager.switch(_text(fields, "model"), _text(fields, "version"))
        return {"version": served.version, "bundle": served.bundle.digest}

    async def _canary(self, fields: Fields) -> Any:
        self._manager.set_canary(_text(fields, "model"), _text(fields, "version"), _share(fields, below=1.0))
        return self._manager.status()

    async def _shadow(self, fields: Fields) -> Any:
        """Start a shadow; without a bundle the current one ends."""
        path = _folder(fields) if "bundle" in fields else None
        await self._manager.start_shadow(_text(fields, "model"), path, _share(fields, below=1.000001))
        return self._manager.status()

    async def _forget(self, fields: Fields) -> Any:
        """Unload the versions that get no requests."""
        self._manager.unload_unused(_text(fields, "model"))
        return self._manager.status()


def _failure(error: Exception, path: str) -> Reply:
    match error:
        case RequestError():
            return error.status, error.headers, {"error": str(error)}
        case InvalidPayload():
            return HTTPStatus.BAD_REQUEST, (), {"error": str(error)}
        case PipelineError():  # the bundle is not what it should be: the caller gets the reason
            log.warning("refused: %s", error, extra=log_fields(path=path))
            return HTTPStatus.UNPROCESSABLE_ENTITY, (), {"error": str(error)}
    log.error("failed", exc_info=error, extra=log_fields(path=path))
    return HTTPStatus.INTERNAL_SERVER_ERROR, (), {"error": f"{type(error).__name__}: {error}"}


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: must be a string")
    return value


def _folder(fields: Fields) -> Path:
    path = Path(_text(fields, "bundle"))
    if not path.is_absolute():
        raise RequestError(f"bundle: {str(path)!r} is not an absolute path")
    return path


def _share(fields: Fields, *, below: float) -> float:
    value = fields.get("share", 1.0 if below > 1 else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < below:
        raise RequestError(f"share: must be a number from 0 to {'at most' if below > 1 else 'below'} 1")
    return float(value)
