from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.contract.signature import SamplingDefaults
from pipeline.system.errors import InvalidPayload
from serve.errors import Busy, DeadlineExceeded, NotFound, RequestError, Unauthorized
from serve.llm.openai_api import DONE, Choice, ResponseBuilder, generation_options, parse_chat, parse_completion
from serve.llm.sampling import Sampling, TokenLogprob
from serve.llm.sequence import Chunk, Detokenizer
from serve.protocol.openai import error_body
from tests.serve.llm import tiny


def _reply(*, chat: bool = False, with_logprobs: bool = False, choices: int = 1) -> ResponseBuilder:
    words = {1: "he", 2: "llo", 3: "<s>", 4: "\ufffd", 5: "\ufffd"}
    return ResponseBuilder(
        chat=chat, request_id="r", model="m", digest="d" * 64, token=words.__getitem__,
        prompt_tokens=3, cached_tokens=lambda: 2, with_logprobs=with_logprobs, created=5,
        choices=[Choice(lambda one: "" if one == 3 else words[one]) for _ in range(choices)],
    )  # fmt: skip


def _events(stream: bytes) -> list[Any]:
    return [json.loads(one.removeprefix(b"data: ")) for one in stream.split(b"\n\n") if one and one != DONE.strip()]


def test_chunks_of_one_text_become_one_choice() -> None:
    reply = _reply(choices=2)
    for chunk in (Chunk(1, "a", tokens=1), Chunk(0, "x", tokens=1), Chunk(1, "b", finish_reason="stop", tokens=1)):
        reply.add(chunk)
    body = json.loads(reply.body())
    assert [(one["index"], one["text"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "x", None),
        (1, "ab", "stop"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert (body["id"], body["object"], body["created"]) == ("cmpl-r", "text_completion", 5)


def test_logprobs_have_text_offsets() -> None:
    reply = _reply(with_logprobs=True)
    reply.add(Chunk(0, "hello", (3, TokenLogprob(1, -0.5, ((2, -0.1),)), TokenLogprob(2, -0.25))))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"] == {
        "tokens": ["<s>", "he", "llo"],
        "token_logprobs": [None, -0.5, -0.25],
        "top_logprobs": [None, {"llo": -0.1, "he": -0.5}, {"llo": -0.25}],
        "text_offset": [0, 0, 2],
    }


def test_tokens_of_one_character_share_its_offset() -> None:
    words, reply = tiny.tokenizer(), _reply(with_logprobs=True)
    reply.token = str
    reply.choices = [Choice(Detokenizer(lambda ids: str(words.decode(list(ids)))).feed)]
    reply.add(Chunk(0, "z☃z", (tiny.BEGIN, *words.encode("z☃z").ids)))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2]


def test_most_likely_of_tokens_with_equal_text_is_reported() -> None:
    reply = _reply(with_logprobs=True)
    reply.add(Chunk(0, "he", (TokenLogprob(1, -3.0, ((4, -0.1), (5, -0.2))),)))
    (choice,) = json.loads(reply.body())["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1, "he": -3.0}]


def test_chat_logprobs_have_bytes_of_whole_characters() -> None:
    reply = _reply(chat=True, with_logprobs=True)
    (event,) = _events(reply.event(Chunk(0, "he", (TokenLogprob(1, -1.0, ((4, -2.0),)),)), usage=False))
    (entry,) = event["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("he", [104, 101])
    assert entry["top_logprobs"] == [{"token": "\ufffd", "logprob": -2.0, "bytes": None}]


def test_chat_stream_begins_with_role_and_ends_with_done() -> None:
    reply = _reply(chat=True)
    opening = _events(b"".join(reply.opening(usage=True)))
    assert [one["choices"][0]["delta"] for one in opening] == [{"role": "assistant", "content": ""}]
    assert opening[0]["usage"] is None
    assert reply.event(Chunk(0, "", tokens=1), usage=True) == b"", "half a character adds no event"
    (last,) = _events(reply.event(Chunk(0, "", finish_reason="length", tokens=1), usage=True))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    closing = reply.closing(usage=True)
    assert closing.endswith(DONE)
    assert _events(closing)[0]["usage"]["completion_tokens"] == 2
    assert reply.closing(usage=False) == DONE


@pytest.mark.parametrize(
    ("refusal", "kind", "param", "code"),
    [
        (RequestError("n: expected `int`"), "invalid_request_error", "n", "invalid"),
        (RequestError("body: not valid JSON: line 3"), "invalid_request_error", "body", "invalid"),
        (RequestError("this model has no chat template; ask: elsewhere"), "invalid_request_error", None, "invalid"),
        (Unauthorized("no key: none"), "invalid_request_error", None, "invalid_api_key"),
        (NotFound("no model 'x'; there are y"), "invalid_request_error", None, "model_not_found"),
        (NotFound("POST /openai/v1/x: not found"), "invalid_request_error", None, "not_found"),
        (Busy("full: try again"), "server_error", None, "busy"),
        (DeadlineExceeded("late"), "server_error", None, "expired"),
        (None, "server_error", None, "internal"),
    ],
)
def test_every_error_has_openais_format(refusal: RequestError | None, kind: str, param: str | None, code: str) -> None:
    error = error_body(refusal)["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, code)
    assert error["message"] == ("internal error; the server's log has the details" if refusal is None else str(refusal))


PROMPT = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def _completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({**PROMPT, **fields}).encode())


def _chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({**CHAT, **fields}).encode())


def test_defaults_of_a_completion() -> None:
    found = generation_options(_completion(), room=100)
    assert (found.max_tokens, found.sampling.temperature, found.sampling.top_p, found.top_logprobs, found.echo) == (
        16,
        1,
        1,
        None,
        False,
    )
    assert generation_options(_completion(), room=5).max_tokens == 5


def test_sampling_defaults_of_the_model_apply_where_the_request_has_none() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    assert generation_options(_chat(), 9, defaults).sampling == Sampling(0.6, 0.95, 20, 0.1, 1.1)
    found = generation_options(_chat(temperature=1, top_k=-1, top_p=None), 9, defaults).sampling
    assert found == Sampling(1.0, 0.95, 0, 0.1, 1.1)


def test_chat_may_use_all_positions_by_default() -> None:
    assert generation_options(_chat(), room=100).max_tokens == 100
    assert generation_options(_chat(max_tokens=7), room=100).max_tokens == 7
    assert generation_options(_chat(max_completion_tokens=8, max_tokens=7), room=100).max_tokens == 8


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_prompt_accepts_four_formats(prompt: Any, prompts: Any) -> None:
    assert _completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]]])
def test_invalid_prompt_is_rejected(prompt: Any) -> None:
    with pytest.raises(InvalidPayload, match="prompt: give a text"):
        _ = _completion(prompt=prompt).prompts


def test_messages_accept_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = _chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "name": "n", "content": parts}])
    assert found.template_messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "n"},
    ]


def test_answers_may_be_sent_back_with_their_reasoning() -> None:
    answer = {"role": "assistant", "content": None, "reasoning_content": "so", "refusal": None, "tool_calls": None}
    found = _chat(messages=[{"role": "user", "content": "x"}, {**answer, "content": "a"}, answer])
    assert found.template_messages == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "a", "reasoning_content": "so"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]
    with pytest.raises(InvalidPayload, match=r"messages\[0\]\.content: is missing"):
        _ = _chat(messages=[{"role": "user", "content": None}]).template_messages


def test_reasoning_is_apart_from_the_content() -> None:
    reply = _reply(chat=True)
    chunks = [Chunk(0, "<think>\nso", tokens=1), Chunk(0, " it</thi", tokens=1), Chunk(0, "nk>\n\n", tokens=1)]
    chunks.append(Chunk(0, "four", finish_reason="stop", tokens=1))
    deltas = [event["choices"][0]["delta"] for chunk in chunks for event in _events(reply.event(chunk, usage=False))]
    assert deltas == [{"reasoning_content": "so"}, {"reasoning_content": " it"}, {"content": "four"}]
    whole = _reply(chat=True)
    for chunk in chunks:
        whole.add(chunk)
    (choice,) = json.loads(whole.body())["choices"]
    message = {"role": "assistant", "content": "four", "refusal": None, "reasoning_content": "so it"}
    assert choice["message"] == message


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"suffix": "x"}, "suffix: is not supported"),
        ({"best_of": 3}, "best_of: is not supported"),
        ({"logit_bias": {"5": 101}}, r"logit_bias: expected `float` <= 100"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected `float` > 0"),
        ({"min_p": 1.5}, "min_p: expected `float` <= 1"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\]: expected `int` >= 0"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty: is not supported"),
        ({"made_up": None, "other": 1}, "other: is not supported"),
        ({"n": 0}, "n: expected `int` >= 1"),
        ({"n": "2"}, "n: expected `int`, got `str`"),
        ({"n": 1.5}, "n: expected `int`, got `float`"),
        ({"temperature": -1}, "temperature: expected `float` >= 0"),
        ({"temperature": 3}, "temperature: expected `float` <= 2"),
        ({"top_p": 0}, "top_p: expected `float` > 0"),
        ({"logprobs": 21}, "logprobs: expected `int` <= 20"),
        ({"max_tokens": -1}, "max_tokens: expected `int` >= 0"),
        ({"stream": "yes"}, "stream: expected `bool`"),
        ({"stream_options": {"nothing": 1}}, "stream_options: contains unknown field `nothing`"),
        ({"prompt": {"a": 1}}, "prompt: expected"),
        ({"prompt": None}, "body: missing required field `prompt`"),
        ({"stop": [1]}, r"stop\[0\]: expected `str`"),
    ],
)
def test_invalid_or_unsupported_completion_field_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        _completion(**fields)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (b'"def f(\xff\xfe):"', "body: not valid JSON: 'utf-8' codec"),
        (b'"\\ud800 half a pair"', "body: not valid JSON: .*surrogate"),
        (b'"no end', "body: not valid JSON"),
    ],
)
def test_invalid_utf8_is_rejected(given: bytes, sentence: str) -> None:
    for parse, body in (
        (parse_completion, b'{"model": "m", "prompt": %b}'),
        (parse_chat, b'{"model": "m", "messages": [{"role": "user", "content": %b}]}'),
    ):
        with pytest.raises(InvalidPayload, match=sentence):
            parse(body % given)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": [{"type": "function"}]}, "tools: is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: is not supported"),
        ({"audio": {}}, "audio: is not supported"),
        ({"messages": []}, "messages: expected `array` of length >= 1"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected `object`, got `array`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role: invalid enum value 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
    ],
)
def test_invalid_or_unsupported_chat_field_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        _chat(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"user": "me", "stop": None, "logprobs": None, "seed": None},
    ],
)
def test_unsupported_fields_with_neutral_values_are_ignored(fields: dict[str, Any]) -> None:
    assert generation_options(_completion(**fields), 100) == generation_options(_completion(), 100)


def test_contradictory_options_are_rejected() -> None:
    for request, sentence in (
        (_completion(max_tokens=0), "max_tokens: 0 requires echo"),
        (_completion(stop=[""]), "stop: give up to 16 strings"),
        (_completion(stop=["x"] * 17), "stop: give up to 16 strings"),
        (_chat(top_logprobs=2), "top_logprobs: requires logprobs"),
    ):
        with pytest.raises(InvalidPayload, match=sentence):
            generation_options(request, 100)


def test_logprobs_of_completions_and_chats() -> None:
    assert generation_options(_completion(logprobs=0), 9).top_logprobs == 0
    assert generation_options(_completion(logprobs=3, echo=True), 9).top_logprobs == 3
    assert generation_options(_chat(logprobs=True), 9).top_logprobs == 0
    assert generation_options(_chat(logprobs=True, top_logprobs=4), 9).top_logprobs == 4
    assert generation_options(_chat(), 9).top_logprobs is None


def test_negative_seed_is_accepted() -> None:
    assert generation_options(_completion(seed=-1), 9).seed == 2**64 - 1
    assert generation_options(_completion(seed=5), 9).seed == 5
