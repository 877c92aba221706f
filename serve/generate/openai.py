"""Answers in the words of OpenAI's API: whole ones, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import orjson

from serve.generate.sampling import Likelihood
from serve.generate.writing import Piece
from serve.refusal import Refusal, Unauthorized, Unknown

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
