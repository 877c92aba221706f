"""Answers in the words of OpenAI's API: whole ones, and the events of a stream.

What OpenAI's two requests for text may say, typed; what is not supported is refused by its name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson

from pipeline.contract.errors import InvalidPayload
from serve.errors import Refusal, Unauthorized, Unknown
from serve.generate.sampling import Likelihood, Sampling
from serve.generate.sequence import Order, Piece
from serve.protocol.v2_json import parse_object

PREFIX = "/openai/"
DONE = b"data: [DONE]\n\n"
_BROKEN = "\ufffd"
_OBJECTS = {False: ("cmpl", "text_completion", "text_completion"), True: ("chatcmpl", "chat.completion", "chat.completion.chunk")}  # fmt: skip  # noqa: E501

Told = Sequence[Likelihood | int]
Token = Callable[[int], str]  # a single one as people read it


@dataclass
class Choice:
    """One text as far as it has come."""

    adds: Token  # what a token adds to the text before it: nothing as long as it is a part of a character
    text: str = ""
    told: list[Likelihood | int] = field(default_factory=list)
    offset: int = 0  # characters of the tokens told of
    finish: str | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.told += piece.told
        self.finish = piece.finish or None


@dataclass
class Reply:
    """To one request."""

    chat: bool
    request_id: str
    model: str
    digest: str
    token: Token
    prompt_tokens: int
    choices: list[Choice]
    telling: bool  # likelihoods are asked for
    completion_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, piece: Piece) -> None:
        self.choices[piece.index].add(piece)
        self.completion_tokens += piece.tokens

    @property
    def usage(self) -> dict[str, int]:
        both = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": both,
        }

    def body(self) -> bytes:
        choices = []
        for index, one in enumerate(self.choices):
            shown: dict[str, Any] = {"text": one.text}
            if self.chat:
                shown = {"message": {"role": "assistant", "content": one.text, "refusal": None}}
            choices.append(self._choice(index, shown, one.told, one.finish))
        return orjson.dumps({**self._head(stream=False), "choices": choices, "usage": self.usage})

    def opening(self, *, usage: bool) -> Iterator[bytes]:
        """Of a conversation: who speaks."""
        for index in range(len(self.choices) if self.chat else 0):
            delta = {"delta": {"role": "assistant", "content": ""}}
            yield self._event([self._choice(index, delta, [], None)], usage=usage)

    def event(self, piece: Piece, *, usage: bool) -> bytes:
        """What one piece adds; nothing where it adds nothing."""
        self.completion_tokens += piece.tokens
        if not (piece.text or piece.told or piece.finish):
            return b""
        shown: dict[str, Any] = {"text": piece.text}
        if self.chat:
            shown = {"delta": {"content": piece.text} if piece.text or not piece.finish else {}}
        return self._event([self._choice(piece.index, shown, piece.told, piece.finish or None)], usage=usage)

    def closing(self, *, usage: bool) -> bytes:
        last = event({**self._head(stream=True), "choices": [], "usage": self.usage}) if usage else b""
        return last + DONE

    def _event(self, choices: list[dict[str, Any]], *, usage: bool) -> bytes:
        """Where usage is asked for, it is in every event, and null but in the last."""
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

    def _choice(self, index: int, shown: dict[str, Any], told: Told, finish: str | None) -> dict[str, Any]:
        logprobs = None
        if self.telling and (told or "delta" not in shown):
            one = self.choices[index]
            logprobs = {"content": _chat_logprobs(told, self.token)} if self.chat else _logprobs(told, self.token, one)
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish}


def event(body: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(body)


def _logprobs(told: Told, token: Token, choice: Choice) -> dict[str, Any]:
    """Of a completion: lists, one entry a token; of a prompt's first token nothing is known."""
    offsets = []
    ids = [one.token if isinstance(one, Likelihood) else one for one in told]
    for one in ids:
        offsets.append(choice.offset)
        choice.offset += len(choice.adds(one))
    return {
        "tokens": [token(one) for one in ids],
        "token_logprobs": [one.logprob if isinstance(one, Likelihood) else None for one in told],
        "top_logprobs": [_by_text(one, token) if isinstance(one, Likelihood) else None for one in told],
        "text_offset": offsets,
    }


def _by_text(told: Likelihood, token: Token) -> dict[str, float]:
    """Several may read alike, as parts of characters do: the likeliest of them is told."""
    found: dict[str, float] = {}
    for one, value in (*told.top, (told.token, told.logprob)):
        found.setdefault(token(one), value)
    return found


def _chat_logprobs(told: Told, token: Token) -> list[dict[str, Any]]:
    return [
        {**_entry(token(one.token), one.logprob), "top_logprobs": [_entry(token(a), b) for a, b in one.top]}
        for one in told
        if isinstance(one, Likelihood)
    ]


def _entry(text: str, logprob: float) -> dict[str, Any]:
    """Of a token that is a part of a character the bytes are not known."""
    return {"token": text, "logprob": logprob, "bytes": None if _BROKEN in text else list(text.encode())}


def models(named: Iterable[tuple[str, int]]) -> dict[str, Any]:
    """The list of them, each with when it was loaded."""
    return {"object": "list", "data": [model(name, created) for name, created in named]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "pipe"}


def failure(refusal: Refusal | None) -> dict[str, Any]:
    """As OpenAI's clients expect it, None for our own fault. The field a sentence begins with is the parameter."""
    if refusal is None:
        text = "internal error; the server's log has the details"
        return {"error": {"message": text, "type": "server_error", "param": None, "code": "internal"}}
    text = str(refusal)
    name, mark, _ = text.partition(": ")
    known = mark and refusal.status == HTTPStatus.BAD_REQUEST and name.isidentifier()
    kind = "invalid_request_error" if refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code: str | None = refusal.reason
    if isinstance(refusal, Unauthorized):
        code = "invalid_api_key"
    elif isinstance(refusal, Unknown):
        code = "model_not_found" if text.startswith(("no model", "model ")) else "not_found"
    return {"error": {"message": text, "type": kind, "param": name if known else None, "code": code}}


MOST_TOP = 20  # likeliest tokens beside each, as OpenAI has it
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Top = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOP)]
_Kind = TypeVar("_Kind", bound="_Asked")
_Stop = str | list[str] | None

_DEFAULT_TOKENS = 16  # of a completion, as OpenAI has it
_MOST_STOPS = 16

# Fields of OpenAI's that change nothing here, whatever they say; and those that are refused unless they say nothing.
_IGNORED = frozenset({"user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # there is none


class _Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Common to both. JSON's null is what leaving a field out is."""

    model: str
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    n: _Count = 1
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(_Asked, forbid_unknown_fields=True, kw_only=True):
    """`POST /openai/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    max_tokens: _Natural | None = None
    logprobs: _Top | None = None
    echo: bool = False

    @property
    def most(self) -> int | None:
        return self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text, or token ids; a list of numbers is one prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        if not self.prompt or (ids and len(ids) != len(self.prompt)):
            raise InvalidPayload("prompt: give a text, a list of texts, token ids, or a list of lists of token ids")
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """As templates know it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer word for it
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class Conversation(_Asked, forbid_unknown_fields=True, kw_only=True):
    """`POST /openai/v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool = False
    top_logprobs: _Top | None = None

    @property
    def plain(self) -> list[dict[str, str]]:
        return [message.plain for message in self.messages]

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def order(asked: Completion | Conversation, room: int) -> Order:
    """`room`: positions that the longest prompt leaves. An answer in a chat may take all of it."""
    whole = isinstance(asked, Completion)
    echo = isinstance(asked, Completion) and asked.echo
    if asked.most == 0 and not echo:
        raise InvalidPayload("max_tokens: 0 without echo asks for nothing")
    if isinstance(asked, Conversation) and asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidPayload("top_logprobs: goes with logprobs: true")
    words = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(words) > _MOST_STOPS or not all(words):
        raise InvalidPayload(f"stop: give up to {_MOST_STOPS} words, none of them empty")
    return Order(
        most=(min(room, _DEFAULT_TOKENS) if whole else room) if asked.most is None else asked.most,
        sampling=Sampling(asked.temperature, asked.top_p, max(0, asked.top_k)),
        stop=tuple(words),
        seed=None if asked.seed is None else asked.seed % 2**64,
        top=asked.top,
        echo=echo,
    )


def completion(body: bytes) -> Completion:
    return _converted(parse_object(body), Completion)


def conversation(body: bytes) -> Conversation:
    return _converted(parse_object(body), Conversation)


def _converted(fields: dict[str, Any], kind: type[_Kind]) -> _Kind:
    given = {name: value for name, value in fields.items() if value is not None and name not in _IGNORED}
    for name in given.keys() & _NEUTRAL.keys():
        if not any(given[name] == neutral for neutral in _NEUTRAL[name]):
            raise InvalidPayload(f"{name}: is not supported by this service; leave it out")
        del given[name]
    if unknown := sorted(given.keys() - set(kind.__struct_fields__)):
        raise InvalidPayload(f"{unknown[0][:100]}: is not supported by this service; leave it out")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidPayload(_sentence(str(error))) from None


def _sentence(text: str) -> str:
    """`Expected `int`, got `str` - at `$.n`` → `n: expected `int`, got `str``."""
    what, _, place = text.partition(" - at ")
    name = place.strip("`").removeprefix("$").removeprefix(".") or "body"
    return f"{name}: {what[:1].lower()}{what[1:]}"
