"""The one place that names the kinds of model: ordinary ones, and language models, whose code is in `serve/llm`.

The rest of the service knows a language model as `TextModel` and `TextRunner` of `serve/runtime/predictor.py`.
"""

from __future__ import annotations

from serve.limits import Budget
from serve.llm.endpoints import OpenAIEndpoints
from serve.llm.openai_api import ChatRequest, CompletionRequest
from serve.models import ModelRepository
from serve.protocol.openapi import COUNT, TEXT, RouteSchemas, Schema, object_schema
from serve.routes import Handler


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


TEXT_ROUTES = ("completions", "chat", "embeddings")
TEXT_SCHEMAS: RouteSchemas = {"completions": (CompletionRequest, completion_answer), "chat": (ChatRequest, chat_answer)}


def text_handlers(repository: ModelRepository, budget: Budget) -> dict[str, Handler]:
    """Return the handlers of OpenAI's API by route."""
    texts = OpenAIEndpoints(repository, budget)
    return {
        "texts_models": texts.models,
        "texts_model": texts.model,
        "completions": texts.complete,
        "chat": texts.chat,
        "embeddings": texts.embed,
    }
