"""OpenAI's endpoints: completions, chat completions and models, whole or as server-sent events."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from serve.errors import NotFound
from serve.limits import BodyLimits, Budget
from serve.llm import openai_api
from serve.llm.model import TextGenerator
from serve.llm.openai_api import ChatRequest, Choice, CompletionRequest, ResponseBuilder, parse_chat, parse_completion
from serve.llm.reasoning import ReasoningParser, opens_reasoning
from serve.llm.sequence import Chunk, Detokenizer, GenerationOptions, SequenceGroup, TextSequence
from serve.load_shedding import admit, set_deadline
from serve.model_version import ModelVersion
from serve.models import ModelRepository
from serve.protocol import embeddings, openai
from serve.request_body import read_body
from serve.request_context import HttpRequest
from serve.routes import JSON, Response, Route, Stream, check_content_type, json_response

T = TypeVar("T")

_VERSION = re.compile(r"(?P<name>[^/]{1,200})/versions/(?P<version>[0-9A-Za-z]{1,64})")
_TAG_TOKENS = 12  # at the end of a prompt, in which `<think>` is searched
_EVENT_STREAM_HEADERS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"))


class OpenAIEndpoints:
    """The endpoints of all language models: the request's body names the model."""

    def __init__(self, repository: ModelRepository, budget: Budget) -> None:
        self._repository, self._budget = repository, budget

    async def models(self, _request: HttpRequest, _route: Route) -> Response:
        current = [version for version, is_current in self._repository.loaded_versions() if is_current]
        return json_response(
            openai.models((version.name, version.created) for version in current if version.openai_kinds)
        )

    async def model(self, request: HttpRequest, route: Route) -> Response:
        version = request.model_version = self._repository.find_version(route.model, route.version)
        if not version.openai_kinds:
            raise _no_texts(version)
        return json_response(openai.model(version.name, version.created))

    async def complete(self, request: HttpRequest, _route: Route) -> Response | Stream:
        return await self._generate(request, parse_completion)

    async def chat(self, request: HttpRequest, _route: Route) -> Response | Stream:
        return await self._generate(request, parse_chat)

    async def embed(self, request: HttpRequest, _route: Route) -> Response:
        check_content_type(request.headers.get(b"content-type"), "application/json")
        parsed = await self._read(request, embeddings.parse)
        version = request.model_version = self._version(parsed.model, request.id)
        if version.predictor.embedding_sizes is None:
            raise NotFound(f"model {version.name!r} computes no embeddings")
        admit(request, version)
        return Response(await version.predict(request, embeddings.Payload(parsed)))

    async def _generate(
        self, request: HttpRequest, parse: Callable[[bytes], CompletionRequest | ChatRequest]
    ) -> Response | Stream:
        check_content_type(request.headers.get(b"content-type"), "application/json")
        parsed = await self._read(request, parse)
        version = request.model_version = self._version(parsed.model, request.id)
        set_deadline(request, version)
        generator = _generator(version)
        request.decode_started_at = time.monotonic()
        prompts = await generator.encode_prompts(parsed)
        request.decoded_at = time.monotonic()
        options = generator.options(parsed, prompts)
        group = SequenceGroup(options, request, buffered=not parsed.stream)
        sequences = generator.sequences(group, prompts, parsed.n)
        builder = _response_builder(request, version, parsed, options, sequences)
        chunks = generator.engine.generate(sequences)
        if not parsed.stream:
            return await _collect(chunks, builder, request)
        events = _events(chunks, builder, request, usage=parsed.with_usage)
        return Stream(
            await _with_first_ready(events),
            _EVENT_STREAM_HEADERS,
            failure=lambda refusal: openai_api.event(openai.error_body(refusal)),
        )

    async def _read(self, request: HttpRequest, parse: Callable[[bytes], T]) -> T:
        """Read and parse a body; the largest limit applies, as the model is known only then."""
        sizes = [(bool(one.openai_kinds), one.predict_limits.size) for one, _ in self._repository.loaded_versions()]
        body = await read_body(request, BodyLimits(max(sizes)[1]), self._budget)
        return await self._budget.parse(len(body), parse, body)

    def _version(self, model: str, request_id: bytes) -> ModelVersion:
        """Find a model by name, with a canary's share, or one version as `NAME/versions/2`."""
        if match := _VERSION.fullmatch(model):
            return self._repository.find_version(match["name"], match["version"])
        return self._repository.find_version(model).choose_by_id(request_id)


def _generator(version: ModelVersion) -> TextGenerator:
    if not isinstance(version.generator, TextGenerator):
        raise _no_texts(version)
    return version.generator


def _no_texts(version: ModelVersion) -> NotFound:
    return NotFound(
        f"model {version.name!r} does not generate text; use /v1/models/{version.name}:predict "
        f"or /v2/models/{version.name}/infer"
    )


def _response_builder(
    request: HttpRequest,
    version: ModelVersion,
    parsed: CompletionRequest | ChatRequest,
    options: GenerationOptions,
    sequences: list[TextSequence],
) -> ResponseBuilder:
    tokenizer = _generator(version).tokenizer
    tags = [tokenizer.text(sequence.prompt[-_TAG_TOKENS:], special=True) for sequence in sequences]
    contexts = [() if options.echo else sequence.prompt for sequence in sequences]
    prompts = sequences[:: parsed.n]
    return ResponseBuilder(
        chat=isinstance(parsed, ChatRequest),
        request_id=request.id.decode(),
        model=parsed.model,
        digest=version.bundle.digest,
        token=tokenizer.token,
        prompt_tokens=sum(len(sequence.prompt) for sequence in prompts),
        cached_tokens=lambda: sum(sequence.cached_tokens for sequence in prompts),
        choices=[
            Choice(Detokenizer(tokenizer.text, context).feed, reasoning=ReasoningParser(opened=opens_reasoning(tag)))
            for context, tag in zip(contexts, tags, strict=True)
        ],
        with_logprobs=options.top_logprobs is not None,
    )


async def _collect(chunks: AsyncGenerator[Chunk, None], builder: ResponseBuilder, request: HttpRequest) -> Response:
    async with aclosing(chunks):
        async for chunk in chunks:
            builder.add(chunk)
    request.run_ended_at = time.monotonic()
    response = Response(builder.body(), (JSON,))
    request.encoded_at = time.monotonic()
    return response


async def _events(
    chunks: AsyncGenerator[Chunk, None], builder: ResponseBuilder, request: HttpRequest, *, usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield events. The first comes with the first token, so that an earlier failure still has its own HTTP status."""
    opened = False
    async with aclosing(chunks):
        async for chunk in chunks:
            opening = b"" if opened else b"".join(builder.opening(usage=usage))
            opened = True
            if events := opening + builder.event(chunk, usage=usage):
                yield events
    request.run_ended_at = request.encoded_at = time.monotonic()
    yield builder.closing(usage=usage)


async def _with_first_ready(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Wait for the first event, which raises early failures, and return all of them."""
    first = await anext(events)

    async def all_events() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first
            async for event in events:
                yield event

    return all_events()
