from __future__ import annotations

import json
from typing import Any

import pytest

from serve.generate.detokenize import Detokenizer
from serve.generate.openai import DONE, Choice, Reply, failure
from serve.generate.sampling import Likelihood
from serve.generate.writing import Piece
from serve.refusal import Busy, Expired, Refusal, Unauthorized, Unknown
from tests.serve.generate import tiny


def _reply(*, chat: bool = False, telling: bool = False, choices: int = 1) -> Reply:
    words = {1: "he", 2: "llo", 3: "<s>", 4: "\ufffd", 5: "\ufffd"}
    return Reply(
        chat=chat, request_id="r", model="m", digest="d" * 64, token=words.__getitem__,
        prompt_tokens=3, choices=[Choice(lambda one: "" if one == 3 else words[one]) for _ in range(choices)],
        telling=telling, created=5,
    )  # fmt: skip


def _events(said: bytes) -> list[Any]:
    return [json.loads(one.removeprefix(b"data: ")) for one in said.split(b"\n\n") if one and one != DONE.strip()]


def test_pieces_of_one_text_become_one_choice() -> None:
    reply = _reply(choices=2)
    for piece in (Piece(1, "a", tokens=1), Piece(0, "x", tokens=1), Piece(1, "b", finish="stop", tokens=1)):
        reply.add(piece)
    body = json.loads(reply.body())
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "x", None),
        (1, "ab", "stop"),
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert (body["id"], body["object"], body["created"]) == ("cmpl-r", "text_completion", 5)


def test_tokens_have_their_place_in_the_text_and_those_without_text_take_none() -> None:
    reply = _reply(telling=True)
    reply.add(Piece(0, "hello", (3, Likelihood(1, -0.5, ((2, -0.1),)), Likelihood(2, -0.25))))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"] == {
        "tokens": ["<s>", "he", "llo"],
        "token_logprobs": [None, -0.5, -0.25],
        "top_logprobs": [None, {"llo": -0.1, "he": -0.5}, {"llo": -0.25}],
        "text_offset": [0, 0, 2],
    }


def test_tokens_that_are_parts_of_a_character_have_its_place() -> None:
    words, reply = tiny.tokenizer(), _reply(telling=True)
    reply.token = str
    reply.choices = [Choice(Detokenizer(lambda ids: str(words.decode(list(ids)))).feed)]
    reply.add(Piece(0, "z☃z", (tiny.BEGIN, *words.encode("z☃z").ids)))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]


def test_of_tokens_that_read_alike_the_likeliest_is_told() -> None:
    reply = _reply(telling=True)
    reply.add(Piece(0, "he", (Likelihood(1, -3.0, ((4, -0.1), (5, -0.2))),)))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1, "he": -3.0}]


def test_in_a_conversation_a_token_tells_its_bytes_where_it_is_whole() -> None:
    reply = _reply(chat=True, telling=True)
    (event,) = _events(reply.event(Piece(0, "he", (Likelihood(1, -1.0, ((4, -2.0),)),)), usage=False))
    (told,) = event["choices"][0]["logprobs"]["content"]
    assert (told["token"], told["bytes"]) == ("he", [104, 101])
    assert told["top_logprobs"] == [{"token": "\ufffd", "logprob": -2.0, "bytes": None}]


def test_a_stream_of_a_conversation_begins_with_who_speaks_and_ends_with_done() -> None:
    reply = _reply(chat=True)
    opening = _events(b"".join(reply.opening(usage=True)))
    assert [one["choices"][0]["delta"] for one in opening] == [{"role": "assistant", "content": ""}]
    assert opening[0]["usage"] is None
    assert reply.event(Piece(0, "", tokens=1), usage=True) == b"", "half a character says nothing"
    (last,) = _events(reply.event(Piece(0, "", finish="length", tokens=1), usage=True))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    closing = reply.closing(usage=True)
    assert closing.endswith(DONE)
    assert _events(closing)[0]["usage"]["completion_tokens"] == 2
    assert reply.closing(usage=False) == DONE


@pytest.mark.parametrize(
    ("refusal", "kind", "param", "code"),
    [
        (Refusal("n: expected `int`"), "invalid_request_error", "n", "invalid"),
        (Refusal("body: not valid JSON: line 3"), "invalid_request_error", "body", "invalid"),
        (Refusal("this model has no chat template; ask: elsewhere"), "invalid_request_error", None, "invalid"),
        (Unauthorized("no key: none"), "invalid_request_error", None, "invalid_api_key"),
        (Unknown("no model 'x'; there are y"), "invalid_request_error", None, "model_not_found"),
        (Unknown("POST /openai/v1/x: not found"), "invalid_request_error", None, "not_found"),
        (Busy("full: try again"), "server_error", None, "busy"),
        (Expired("late"), "server_error", None, "expired"),
        (None, "server_error", None, "internal"),
    ],
)
def test_every_refusal_has_openais_form(refusal: Refusal | None, kind: str, param: str | None, code: str) -> None:
    error = failure(refusal)["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, code)
    assert error["message"] == ("internal error; the server's log has the details" if refusal is None else str(refusal))
