"""What OpenAI's two requests for text may say, typed; what is not supported is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from pipeline.spec.errors import InvalidPayload
from serve.generate.sampling import Sampling
from serve.generate.writing import Order
from serve.protocol.jsonobject import parse_object

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
