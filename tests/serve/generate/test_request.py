from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.spec.errors import InvalidPayload
from serve.generate.request import completion, conversation, order

PROMPT = {"model": "m", "prompt": "x"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def _completion(**fields: Any) -> Any:
    return completion(json.dumps({**PROMPT, **fields}).encode())


def _chat(**fields: Any) -> Any:
    return conversation(json.dumps({**CHAT, **fields}).encode())


def test_a_completion_says_nothing_more_than_it_must() -> None:
    found = order(_completion(), room=100)
    assert (found.most, found.sampling.temperature, found.sampling.top_p, found.top, found.echo) == (
        16,
        1,
        1,
        None,
        False,
    )
    assert order(_completion(), room=5).most == 5


def test_an_answer_in_a_chat_may_take_the_room_there_is() -> None:
    assert order(_chat(), room=100).most == 100
    assert order(_chat(max_tokens=7), room=100).most == 7
    assert order(_chat(max_completion_tokens=8, max_tokens=7), room=100).most == 8


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: Any) -> None:
    assert _completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, [2]]])
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidPayload, match="prompt: give a text"):
        _ = _completion(prompt=prompt).prompts


def test_messages_come_as_texts_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = _chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "name": "n", "content": parts}])
    assert found.plain == [{"role": "system", "content": "s"}, {"role": "user", "content": "ab", "name": "n"}]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"suffix": "x"}, "suffix: is not supported"),
        ({"best_of": 3}, "best_of: is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias: is not supported"),
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
        ({"stream_options": {"nothing": 1}}, "stream_options: object contains unknown field `nothing`"),
        ({"prompt": {"a": 1}}, "prompt: expected"),
        ({"prompt": None}, "body: object missing required field `prompt`"),
        ({"stop": [1]}, r"stop\[0\]: expected `str`"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        _completion(**fields)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (b'"def f(\xff\xfe):"', "body: not valid JSON: .*not valid UTF-8"),
        (b'"\\ud800 half a pair"', "body: not valid JSON: .*surrogate"),
        (b'"no end', "body: not valid JSON"),
    ],
)
def test_a_text_that_is_no_utf8_is_refused_by_both(given: bytes, sentence: str) -> None:
    for parse, body in (
        (completion, b'{"model": "m", "prompt": %b}'),
        (conversation, b'{"model": "m", "messages": [{"role": "user", "content": %b}]}'),
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
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\]\.role: invalid enum value 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
    ],
)
def test_in_a_conversation_too(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidPayload, match=sentence):
        _chat(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"user": "me", "stop": None, "logprobs": None, "seed": None},
    ],
)
def test_fields_that_ask_for_nothing_are_passed_over(fields: dict[str, Any]) -> None:
    assert order(_completion(**fields), 100) == order(_completion(), 100)


def test_orders_that_contradict_themselves_are_refused() -> None:
    for asked, sentence in (
        (_completion(max_tokens=0), "max_tokens: 0 without echo"),
        (_completion(stop=[""]), "stop: give up to 16 words"),
        (_completion(stop=["x"] * 17), "stop: give up to 16 words"),
        (_chat(top_logprobs=2), "top_logprobs: goes with logprobs"),
    ):
        with pytest.raises(InvalidPayload, match=sentence):
            order(asked, 100)


def test_likelihoods_are_asked_for_in_two_ways() -> None:
    assert order(_completion(logprobs=0), 9).top == 0
    assert order(_completion(logprobs=3, echo=True), 9).top == 3
    assert order(_chat(logprobs=True), 9).top == 0
    assert order(_chat(logprobs=True, top_logprobs=4), 9).top == 4
    assert order(_chat(), 9).top is None


def test_any_seed_is_one() -> None:
    assert order(_completion(seed=-1), 9).seed == 2**64 - 1
    assert order(_completion(seed=5), 9).seed == 5
