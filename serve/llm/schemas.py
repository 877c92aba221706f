"""The schemas of generated texts in the OpenAPI document."""

from __future__ import annotations

from serve.protocol.openapi import COUNT, TEXT, Schema, object_schema


def completion_answer() -> Schema:
    return _answer("text_completion", {"text": TEXT})


def chat_answer() -> Schema:
    content = {"type": ["string", "null"], "description": "null: the answer ended within the reasoning"}
    message = object_schema({"role": {"const": "assistant"}, "content": content, "refusal": {"type": "null"}})
    message["properties"]["reasoning_content"] = {"type": "string", "description": "the text in <think>…</think>"}
    return _answer("chat.completion", {"message": message})


def _answer(kind: str, own: Schema) -> Schema:
    choice = {"index": COUNT, **own, "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length"]}}  # fmt: skip  # noqa: E501
    usage = {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_schema({"cached_tokens": COUNT}),
    }
    return object_schema(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": COUNT,
            "model": TEXT,
            "system_fingerprint": TEXT,
            "choices": {"type": "array", "items": object_schema(choice)},
            "usage": object_schema(usage),
        }
    )
