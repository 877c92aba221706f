"""The admin interface: load a bundle, switch to it, run it as a canary or a shadow. Never on the public port."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson

from pipeline.contract.errors import InvalidPayload, PipelineError
from serve.errors import ClientDisconnected, Headers, MethodNotAllowed, NotFound, RequestError, Unauthorized
from serve.http1.connection import HttpRequest
from serve.logs import log_fields
from serve.models import ModelManager
from serve.request_body import MemoryBudget, parse_object, read_body
from serve.security import is_token

_MAX_BODY_BYTES = 64 << 10

log = logging.getLogger(__name__)

Fields = Mapping[str, Any]


class Admin:
    """The application of the admin port: `GET /` returns the status, `POST /<what>` changes it; both need the token."""

    def __init__(self, manager: ModelManager, token: str) -> None:
        self._manager, self._token = manager, token
        self._budget = MemoryBudget()
        self._changes: dict[str, Callable[[Fields], Awaitable[Any]]] = {
            "/load": self._load,
            "/switch": self._switch,
            "/canary": self._canary,
            "/shadow": self._shadow,
            "/forget": self._forget,
        }

    def begin(self, request: HttpRequest) -> Coroutine[Any, Any, None]:
        return self._respond(request)

    async def _respond(self, request: HttpRequest) -> None:
        status, extra = int(HTTPStatus.OK), Headers()
        fields = log_fields(path=request.path, request_id=request.id.decode())
        try:
            body = await self._answer(request)
        except ClientDisconnected:
            return
        except RequestError as refusal:
            status, extra, body = refusal.status, refusal.headers, {"error": str(refusal)}
        except InvalidPayload as error:
            status, body = HTTPStatus.BAD_REQUEST, {"error": str(error)}
        except PipelineError as error:  # the bundle is not what it should be: the caller gets the reason
            log.warning("refused: %s", error, extra=fields)
            status, body = HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)}
        except Exception as error:
            log.exception("failed", extra=fields)
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        finally:
            self._budget.release(request)
        headers = ((b"content-type", b"application/json"), *extra, (b"x-request-id", request.id))
        await request.respond(status, headers, orjson.dumps(body))

    async def _answer(self, request: HttpRequest) -> Any:
        if not is_token(request.headers.get(b"authorization", b""), self._token):
            raise Unauthorized("the admin interface needs its token: authorization: Bearer …")
        path, method = request.path, request.method
        if path != "/" and path not in self._changes:
            raise NotFound(f"{path[:200]}: not found; there are /, {', '.join(self._changes)}")
        if method != (allowed := "GET" if path == "/" else "POST"):
            raise MethodNotAllowed(f"{method[:16]} {path}: only {allowed}", allowed)
        if path == "/":
            return self._manager.status()
        return await self._changes[path](parse_object(await read_body(request, _MAX_BODY_BYTES, self._budget)))

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
