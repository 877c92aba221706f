"""Requests and responses of OpenAI's completions and chat completions, whole or as a stream of events.

Fields that are not supported are rejected by name.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import orjson

from pipeline.contract.signature import SamplingDefaults
from pipeline.system.errors import InvalidPayload
from serve.llm.reasoning import ReasoningParser
from serve.llm.sampling import Sampling, TokenLogprob
from serve.llm.sequence import Chunk, GenerationOptions, Logprobs
from serve.protocol.openai import Texts, convert_fields, split_texts
from serve.request_body import parse_object

DONE = b"data: [DONE]\n\n"
_REPLACEMENT = "\ufffd"
_OBJECTS = {False: ("cmpl", "text_completion", "text_completion"), True: ("chatcmpl", "chat.completion", "chat.completion.chunk")}  # fmt: skip  # noqa: E501

TokenText = Callable[[int], str]


@dataclass
class Choice:
    """One text, as far as it was generated."""

    detokenize: TokenText  # the text that a token adds; empty while a character is incomplete
    text: str = ""
    logprobs: list[TokenLogprob | int] = field(default_factory=list)
    offset: int = 0  # characters of the tokens with log probabilities
    finish_reason: str | None = None
    reasoning: ReasoningParser = field(default_factory=ReasoningParser)  # of a chat

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason or None


@dataclass
class ResponseBuilder:
    """The response to one request."""

    chat: bool
    request_id: str
    model: str
    digest: str
    token: TokenText
    prompt_tokens: int
    cached_tokens: Callable[[], int]  # of the prompts; known when they were read
    choices: list[Choice]
    with_logprobs: bool
    completion_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, chunk: Chunk) -> None:
        self.choices[chunk.index].add(chunk)
        self.completion_tokens += chunk.tokens

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens()},
        }

    def body(self) -> bytes:
        choices = []
        for index, choice in enumerate(self.choices):
            content: dict[str, Any] = {"text": choice.text}
            if self.chat:
                content = {"message": _message(choice)}
            choices.append(self._choice(index, content, choice.logprobs, choice.finish_reason))
        return orjson.dumps({**self._head(stream=False), "choices": choices, "usage": self.usage})

    def opening(self, *, usage: bool) -> Iterator[bytes]:
        """Yield the first events of a chat, which name the role."""
        for index in range(len(self.choices) if self.chat else 0):
            delta = {"delta": {"role": "assistant", "content": ""}}
            yield self._event([self._choice(index, delta, [], None)], usage=usage)

    def event(self, chunk: Chunk, *, usage: bool) -> bytes:
        """Return the event for a chunk; empty where it adds nothing."""
        self.completion_tokens += chunk.tokens
        if not (chunk.text or chunk.logprobs or chunk.finish_reason):
            return b""
        content: dict[str, Any] = {"text": chunk.text}
        if self.chat:
            delta = _delta(self.choices[chunk.index], chunk)
            if not (delta or chunk.logprobs or chunk.finish_reason):
                return b""
            content = {"delta": delta or ({} if chunk.finish_reason else {"content": ""})}
        return self._event(
            [self._choice(chunk.index, content, chunk.logprobs, chunk.finish_reason or None)], usage=usage
        )

    def closing(self, *, usage: bool) -> bytes:
        last = event({**self._head(stream=True), "choices": [], "usage": self.usage}) if usage else b""
        return last + DONE

    def _event(self, choices: list[dict[str, Any]], *, usage: bool) -> bytes:
        """Where usage is requested, every event has it: null except in the last one."""
        return event({**self._head(stream=True), "choices": choices, **({"usage": None} if usage else {})})

    def _head(self, *, stream: bool) -> dict[str, Any]:
        prefix, whole, part = _OBJECTS[self.chat]
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": part if stream else whole,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.digest[:12]}",
        }

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Logprobs, finish_reason: str | None
    ) -> dict[str, Any]:
        rendered = None
        if self.with_logprobs and (logprobs or "delta" not in content):
            if self.chat:
                rendered = {"content": _chat_logprobs(logprobs, self.token)}
            else:
                rendered = _completion_logprobs(logprobs, self.token, self.choices[index])
        return {"index": index, **content, "logprobs": rendered, "finish_reason": finish_reason}


def _message(choice: Choice) -> dict[str, Any]:
    """Return the assistant's message; its content is null where the answer ended within the reasoning."""
    reasoning, content = choice.reasoning.feed(choice.text, last=True)
    message = {"role": "assistant", "content": content, "refusal": None}
    return {**message, "content": content or None, "reasoning_content": reasoning} if reasoning else message


def _delta(choice: Choice, chunk: Chunk) -> dict[str, str]:
    reasoning, content = choice.reasoning.feed(chunk.text, last=bool(chunk.finish_reason))
    parts = {"reasoning_content": reasoning, "content": content}
    return {name: text for name, text in parts.items() if text}


def event(body: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(body)


def _completion_logprobs(logprobs: Logprobs, token: TokenText, choice: Choice) -> dict[str, Any]:
    """Return lists with one entry per token; the first token of a prompt has no log probability."""
    offsets = []
    ids = [entry.token if isinstance(entry, TokenLogprob) else entry for entry in logprobs]
    for token_id in ids:
        offsets.append(choice.offset)
        choice.offset += len(choice.detokenize(token_id))
    return {
        "tokens": [token(token_id) for token_id in ids],
        "token_logprobs": [entry.logprob if isinstance(entry, TokenLogprob) else None for entry in logprobs],
        "top_logprobs": [_by_text(entry, token) if isinstance(entry, TokenLogprob) else None for entry in logprobs],
        "text_offset": offsets,
    }


def _by_text(logprob: TokenLogprob, token: TokenText) -> dict[str, float]:
    """Return log probabilities by text. Of tokens with equal texts, as parts of characters, the most likely counts."""
    by_text: dict[str, float] = {}
    for token_id, value in (*logprob.top, (logprob.token, logprob.logprob)):
        by_text.setdefault(token(token_id), value)
    return by_text


def _chat_logprobs(logprobs: Logprobs, token: TokenText) -> list[dict[str, Any]]:
    return [
        {
            **_token_entry(token(entry.token), entry.logprob),
            "top_logprobs": [_token_entry(token(token_id), value) for token_id, value in entry.top],
        }
        for entry in logprobs
        if isinstance(entry, TokenLogprob)
    ]


def _token_entry(text: str, logprob: float) -> dict[str, Any]:
    """Return an entry; the bytes of a token that is a part of a character are not known."""
    return {"token": text, "logprob": logprob, "bytes": None if _REPLACEMENT in text else list(text.encode())}


MAX_TOP_LOGPROBS = 20  # OpenAI's limit
MAX_REPETITION_PENALTY = 100.0  # beyond it logits overflow
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_TopCount = Annotated[
    int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS, description="number of alternatives to report for each token")
]

_DEFAULT_MAX_TOKENS = 16  # of a completion, as with OpenAI
_MAX_STOP_STRINGS = 16
_TOKEN_ID = re.compile(r"[0-9]{1,18}")
_NO_DEFAULTS = SamplingDefaults()  # OpenAI's own


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, without effect


class _TextRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The common fields. JSON null is treated like a missing field."""

    model: str
    # None: the model's own defaults.
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, description="0 and -1: no limit")] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=MAX_REPETITION_PENALTY)] | None = None
    logit_bias: Annotated[
        Mapping[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]],
        msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^[0-9]{1,6}$"}}),
    ] = {}  # by token id
    stop_token_ids: list[_Natural] = []
    n: Annotated[int, msgspec.Meta(ge=1, description="texts for each prompt")] = 1
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_TextRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /openai/v1/completions`."""

    prompt: Texts
    max_tokens: Annotated[int, msgspec.Meta(ge=0, description="of the answer; default 16")] | None = None
    logprobs: _TopCount | None = None
    echo: bool = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        return split_texts(self.prompt, "prompt")


class Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None  # of an earlier answer, which clients send back

    def for_template(self, position: int) -> dict[str, str]:
        """Return the message with the fields and roles that chat templates know."""
        if self.content is None and not (self.role == "assistant" and self.reasoning_content):
            raise InvalidPayload(f"messages[{position}].content: is missing")
        parts = [] if self.content is None else self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name
        optional = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": text} | {name: value for name, value in optional.items() if value}


class ChatRequest(_TextRequest, forbid_unknown_fields=True, kw_only=True):
    """`POST /openai/v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, description="of the answer; default: as many as fit")] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, description="newer name of max_tokens")] | None = None
    logprobs: bool = False
    top_logprobs: _TopCount | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def template_messages(self) -> list[dict[str, str]]:
        return [message.for_template(position) for position, message in enumerate(self.messages)]

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def generation_options(
    request: CompletionRequest | ChatRequest, room: int, defaults: SamplingDefaults = _NO_DEFAULTS
) -> GenerationOptions:
    """Validate a request. `room` is the number of positions after the longest prompt; a chat may use all of it."""
    limit, echo = request.token_limit, isinstance(request, CompletionRequest) and request.echo
    if limit == 0 and not echo:
        raise InvalidPayload("max_tokens: 0 requires echo: true")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise InvalidPayload("top_logprobs: requires logprobs: true")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stop) > _MAX_STOP_STRINGS or not all(stop):
        raise InvalidPayload(f"stop: give up to {_MAX_STOP_STRINGS} strings, none of them empty")
    if limit is None:
        limit = min(room, _DEFAULT_MAX_TOKENS) if isinstance(request, CompletionRequest) else room
    return GenerationOptions(
        max_tokens=limit,
        sampling=_sampling(request, defaults),
        stop=tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids),
        seed=None if request.seed is None else request.seed % 2**64,
        top_logprobs=request.logprob_count,
        echo=echo,
    )


def _sampling(request: _TextRequest, defaults: SamplingDefaults) -> Sampling:
    """Return how tokens are chosen: as the request states, otherwise by the model's defaults."""
    values = {name: default if (value := getattr(request, name, None)) is None else value for name, default in defaults}
    if wrong := [name for name in request.logit_bias if not _TOKEN_ID.fullmatch(name)]:
        raise InvalidPayload(f"logit_bias: {wrong[0][:100]!r} is not a token id")
    biases = {int(name): bias for name, bias in request.logit_bias.items()}
    return Sampling(**{**values, "top_k": max(0, values["top_k"])}, logit_bias=biases)


def parse_completion(body: bytes) -> CompletionRequest:
    return convert_fields(parse_object(body), CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse a request. In messages null is like a missing field, too: clients send answers back as they got them."""
    fields = parse_object(body)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            {name: value for name, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return convert_fields(fields, ChatRequest)
