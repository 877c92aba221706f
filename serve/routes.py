"""The HTTP interface of the service: its paths, their methods, and the responses that endpoints return."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from serve.errors import Headers, MethodNotAllowed, NotFound, RequestError, UnsupportedMediaType
from serve.request_context import HttpRequest

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_READ = ("GET", "HEAD")
_POST = ("POST",)


@dataclass(frozen=True, slots=True)
class Route:
    """`model` and `version` are empty where the path names none."""

    kind: str
    methods: tuple[str, ...]
    model: str = ""
    version: str = ""


# kind of route → its path in OpenAPI, and its methods
PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "root": ("/", _READ),
    "page_counters": ("/page.json", _READ),
    "metrics": ("/metrics", _READ),
    "openapi": ("/openapi.json", _READ),
    "v1_models": ("/v1/models", _READ),
    "v1_model": ("/v1/models/{model_name}", _READ),
    "predict": ("/v1/models/{model_name}:predict", _POST),
    "server": ("/v2", _READ),
    "live": ("/v2/health/live", _READ),
    "ready": ("/v2/health/ready", _READ),
    "models": ("/v2/models", _READ),
    "model": ("/v2/models/{model_name}", _READ),
    "model_ready": ("/v2/models/{model_name}/ready", _READ),
    "infer": ("/v2/models/{model_name}/infer", _POST),
    "index": ("/v2/repository/index", _POST),
    "statistics": ("/v2/models/stats", _READ),
    "model_statistics": ("/v2/models/{model_name}/stats", _READ),
    "feedback": ("/feedback", _POST),
    "texts_models": ("/openai/v1/models", _READ),
    "texts_model": ("/openai/v1/models/{model_name}", _READ),
    "completions": ("/openai/v1/completions", _POST),
    "chat": ("/openai/v1/chat/completions", _POST),
    "embeddings": ("/openai/v1/embeddings", _POST),
}
# Paths of these protocols that the service does not offer, and why.
_ABSENT = {
    rf"/v1/models/{MODEL_NAME}(/versions/[0-9A-Za-z]+)?:explain": "this service has no explainer; use :predict",
    rf"/v2/repository/models/{MODEL_NAME}/(un)?load": (
        "models are loaded by the operator (`pipe deploy`), never by clients"
    ),
    rf"/v2/models/{MODEL_NAME}(/versions/[0-9A-Za-z]+)?/config": (
        "models have no Triton configuration; the same path without /config has their inputs, outputs and properties"
    ),
    rf"/v2/models/{MODEL_NAME}(/versions/[0-9A-Za-z]+)?/generate(_stream)?": (
        "this service has no generate endpoint; language models answer at /openai/v1/completions"
    ),
    rf"/v2(/models/{MODEL_NAME})?/trace/setting": "traces are set by the OTEL_ variables of the service",
    r"/v2/logging": "logs are set by --log-format and serve.log_requests, never by clients",
    r"/v2/(system|cuda)sharedmemory(/region/[^/]+)?/(status|register|unregister)": (
        "this service shares no memory with clients; send tensors as raw bytes (binary tensor data extension)"
    ),
    r"/openai/v1/(rerank|responses|moderations|edits|images/.*|audio/.*|files|batches)": (
        "of OpenAI's API there are completions, chat/completions, embeddings and models"
    ),
}
_PROBED = frozenset({"live", "ready"})  # not model_ready: names of models could be guessed


def _pattern(path: str) -> re.Pattern[str]:
    model = f"(?P<model>{MODEL_NAME})(?:/versions/(?P<version>[0-9A-Za-z]{{1,64}}))?"
    return re.compile(re.escape(path).replace(re.escape("{model_name}"), model))


_FIXED = {path: Route(kind, methods) for kind, (path, methods) in PATHS.items() if "{" not in path}
_FIXED["/v2/"] = _FIXED["/v2"]  # as the protocol's OpenAPI has it
_NAMED = [(_pattern(path), kind, methods) for kind, (path, methods) in PATHS.items() if "{" in path]


@functools.lru_cache(maxsize=4096)
def find_route(path: str, method: str) -> Route:
    """Return the route, or raise an error that names what there is."""
    route = _FIXED.get(path) or _match(path)
    if route is None:
        raise NotFound(f"{method[:16]} {path[:200]}: {_why_not(path)}")
    if method not in route.methods:
        text = f"{method[:16]} {path[:200]}: only {' and '.join(route.methods)}"
        raise MethodNotAllowed(text, ", ".join(route.methods))
    return route


def needs_no_key(path: str, method: str) -> bool:
    """Return True for the paths of probes, which have no key."""
    try:
        return find_route(path, method).kind in _PROBED
    except RequestError:  # clients without a key do not learn which paths exist
        return False


def _match(path: str) -> Route | None:
    for pattern, kind, methods in _NAMED:
        if found := pattern.fullmatch(path):
            return Route(kind, methods, found["model"], found["version"] or "")
    return None


def _why_not(path: str) -> str:
    reasons = (reason for pattern, reason in _ABSENT.items() if re.fullmatch(pattern, path))
    return next(reasons, "not found; /openapi.json lists what there is")


JSON = (b"content-type", b"application/json")
_CURL = "application/x-www-form-urlencoded"  # the default of `curl -d`, read as JSON


@dataclass(slots=True)  # not frozen, which makes it three times as slow to create
class Response:
    body: bytes
    headers: Headers = (JSON,)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Stream:
    """A response that comes in parts, none of them empty; a failure after the first becomes the last part."""

    parts: AsyncGenerator[bytes, None]
    headers: Headers
    failure: Callable[[RequestError | None], bytes]  # None: our own fault


Handler = Callable[[HttpRequest, Route], Awaitable[Response | Stream]]


def json_response(body: Any, status: int = 200, headers: Headers = ()) -> Response:
    return Response(orjson.dumps(body), (JSON, *headers), status)


def check_content_type(given: bytes | None, *accepted: str) -> None:
    """Raise UnsupportedMediaType for other types than these, curl's default and none."""
    if given is None or given == b"application/json":
        return
    found = given.decode("latin-1")
    charset = found.partition(";")[2].strip().lower().removeprefix("charset=").strip('"')
    if media_type(given) not in (*accepted, _CURL) or charset not in ("", "utf-8"):
        raise UnsupportedMediaType(f"content-type: {found[:200]!r} given, send {' or '.join(accepted)}")


def media_type(given: bytes) -> str:
    """Return the type of a `content-type` without its parameters."""
    return given.partition(b";")[0].strip().lower().decode("latin-1")
