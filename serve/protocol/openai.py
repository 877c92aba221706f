"""What all endpoints of OpenAI's API share: the list of models, errors, and the fields of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from pipeline.system.errors import InvalidPayload
from serve.errors import INTERNAL, NotFound, RequestError, Unauthorized
from serve.request_body import error_sentence

PREFIX = "/openai/"
Texts = str | list[str | int | list[int]]
_Request = TypeVar("_Request", bound=msgspec.Struct)

# OpenAI's fields that have no effect here, and fields that are rejected unless they have one of these values.
_IGNORED = frozenset({"user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "web_search_options": (),
}


def models(created: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """Return the list of models, each with the time when it was loaded."""
    return {"object": "list", "data": [model(name, seconds) for name, seconds in created]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "pipe"}


def error_body(refusal: RequestError | None) -> dict[str, Any]:
    """Return an error in OpenAI's format; None is an internal error. A field that begins the message is `param`."""
    if refusal is None:
        return {"error": {"message": INTERNAL, "type": "server_error", "param": None, "code": "internal"}}
    text = str(refusal)
    name, colon, _ = text.partition(": ")
    is_field = colon and refusal.status == HTTPStatus.BAD_REQUEST and name.isidentifier()
    kind = "invalid_request_error" if refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code: str | None = refusal.reason
    if isinstance(refusal, Unauthorized):
        code = "invalid_api_key"
    elif isinstance(refusal, NotFound):
        code = "model_not_found" if text.startswith(("no model", "model ")) else "not_found"
    return {"error": {"message": text, "type": kind, "param": name if is_field else None, "code": code}}


def split_texts(value: Texts, name: str) -> list[str | list[int]]:
    """Return each text of a request's field, or its token ids; a list of numbers is one text."""
    if isinstance(value, str):
        return [value]
    ids = [item for item in value if isinstance(item, int)]
    if not value or (ids and len(ids) != len(value)):
        raise InvalidPayload(f"{name}: give a text, a list of texts, token ids, or a list of lists of token ids")
    return [ids] if ids else [item for item in value if not isinstance(item, int)]


def convert_fields(fields: dict[str, Any], kind: type[_Request]) -> _Request:
    present = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    for name in present.keys() & _NEUTRAL.keys():
        if not any(present[name] == neutral for neutral in _NEUTRAL[name]):
            raise InvalidPayload(f"{name}: is not supported by this service; leave it out")
        del present[name]
    if unknown := present.keys() - set(kind.__struct_fields__):
        raise InvalidPayload(f"{min(unknown)[:100]}: is not supported by this service; leave it out")
    try:
        return msgspec.convert(present, kind)
    except msgspec.ValidationError as error:
        raise InvalidPayload(error_sentence(error)) from None
