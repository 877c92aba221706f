"""JSON schemas of OpenAI's requests for texts and of their answers: what of them is understood here."""

from __future__ import annotations

from collections.abc import Sequence

from serve.protocol.schemas import Schema

_TEXT: Schema = {"type": "string"}
_TRUTH: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_WORD: Schema = {"type": "string", "minLength": 1}


def failure() -> Schema:
    told = {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    return _object({"error": _object(told)})


def models() -> Schema:
    return _object({"object": {"const": "list"}, "data": {"type": "array", "items": model()}})


def model() -> Schema:
    return _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT})


def completion_request(names: Sequence[str]) -> Schema:
    ids = {"type": "array", "items": _COUNT, "minItems": 1}
    prompts: list[Schema] = [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, ids]
    return _request(
        names,
        {
            "prompt": {"anyOf": [*prompts, {"type": "array", "items": ids, "minItems": 1}]},
            "max_tokens": _nullable(0, told="of the answer; 16 where nothing is said"),
            "logprobs": _nullable(0, 20, "likeliest tokens told beside each"),
            "echo": _TRUTH,
        },
        ["prompt"],
    )


def chat_request(names: Sequence[str]) -> Schema:
    part = _object({"type": {"const": "text"}, "text": _TEXT})
    message = {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
        "name": {"type": ["string", "null"]},
    }
    return _request(
        names,
        {
            "messages": {"type": "array", "minItems": 1, "items": _object(message, ["role", "content"])},
            "max_tokens": _nullable(1, told="of the answer; as many as there is room for where nothing is said"),
            "max_completion_tokens": _nullable(1, told="the same under its newer name"),
            "logprobs": _TRUTH,
            "top_logprobs": _nullable(0, 20, "likeliest tokens told beside each"),
        },
        ["messages"],
    )


def completion_answer() -> Schema:
    return _answer("text_completion", {"text": _TEXT})


def chat_answer() -> Schema:
    message = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
    return _answer("chat.completion", {"message": message})


def _request(names: Sequence[str], own: Schema, required: Sequence[str]) -> Schema:
    stop: list[Schema] = [_WORD, {"type": "array", "items": _WORD, "maxItems": 16}, {"type": "null"}]
    known: Schema = {
        "model": {
            "anyOf": [{"enum": list(names)}, {"type": "string", "pattern": "^[^/]+/versions/[0-9A-Za-z]{1,64}$"}]
        },
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _nullable(-1, told="0 and -1: any of them"),
        "n": _nullable(1, told="texts for each prompt"),
        "seed": _nullable(-(2**63), 2**63 - 1, "the same draws for the same seed"),
        "stop": {"anyOf": stop},
        "stream": _TRUTH,
        "stream_options": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
        },
        "user": {"description": "as some other fields of OpenAI's: changes nothing"},
    }
    return _object({**known, **own}, ["model", *required])


def _answer(kind: str, own: Schema) -> Schema:
    choice = {"index": _COUNT, **own, "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length"]}}  # fmt: skip  # noqa: E501
    usage = {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": {"type": "array", "items": _object(choice)},
            "usage": _object(usage),
        }
    )


def _nullable(least: int, most: int | None = None, told: str = "") -> Schema:
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return {"type": ["integer", "null"], **bounds, "description": told}


def _object(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    return {
        "type": "object",
        "required": list(properties if required is None else required),
        "additionalProperties": False,
        "properties": properties,
    }
