"""The one place that names the kinds of model: ordinary ones, and language models, whose code is in `serve/llm`.

The rest of the service knows a language model as `TextModel` and `TextRunner` of `serve/runtime/texts.py`.
"""

from __future__ import annotations

from serve.limits import Budget
from serve.llm.endpoints import OpenAIEndpoints
from serve.llm.openai_api import ChatRequest, CompletionRequest
from serve.llm.schemas import chat_answer, completion_answer
from serve.models import ModelRepository
from serve.protocol.openapi import RouteSchemas
from serve.routes import Handler

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
