"""OpenAI's own client against the service."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import openai
import pytest

from serve.routes import PATHS, find_route
from tests.serve.llm import tiny

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


LONG = 4096  # positions, enough for a text that takes a while
TOKENIZER = tiny.tokenizer()
TEXTS = ["hello world", "the quick brown fox jumps over", "x", "print('hello'", "import os", "größer €"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without an end token."""
    template = tiny.TEMPLATE + "{% if enable_thinking %}<think>\n{% endif %}"
    return tiny.build(tmp_path_factory.mktemp("texts") / "bundle", positions=LONG, end=(), template=template)


@pytest.fixture(scope="module")
def server(module_launcher: Launcher, bundle: Path) -> Running:
    return module_launcher(bundle)


def _client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with _client(server) as made:
        yield made


def _greedy_text(bundle: Path, text: str, most: int) -> str:
    return str(TOKENIZER.decode(tiny.greedy_tokens(bundle, [tiny.BEGIN, *TOKENIZER.encode(text).ids], most)))


def _text(client: openai.OpenAI, prompt: Any, most: int = 12, **fields: Any) -> str:
    found = client.completions.create(model="tiny", prompt=prompt, max_tokens=most, temperature=0, **fields)
    return str(found.choices[0].text)


def _metric(server: Running, line: str) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return next(float(one.split()[-1]) for one in text.splitlines() if one.startswith(line))


def _wait_until(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_concurrent_requests_get_the_same_texts_as_single_ones(client: openai.OpenAI, bundle: Path) -> None:
    lengths = [5, 30, 12, 18, 40, 9]
    cases = [(text, most) for text, most in zip(TEXTS, lengths, strict=True)] * 3
    with ThreadPoolExecutor(18) as pool:
        found = list(pool.map(lambda one: _text(client, one[0], one[1]), cases))
    assert found == [_greedy_text(bundle, text, most) for text, most in cases]


def test_stream_has_the_same_text_as_a_whole_response(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": TEXTS[0], "max_tokens": 20, "seed": 7, "logprobs": 1}
    whole = client.completions.create(**fields)
    events = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    *parts, last = events
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts][-1] == "length" == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 20
    logprobs = [
        one for part in parts if part.choices[0].logprobs for one in part.choices[0].logprobs.token_logprobs or []
    ]
    assert whole.choices[0].logprobs is not None
    assert logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)


def test_chat_uses_the_template(client: openai.OpenAI, bundle: Path) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "x"},
    ]
    ids = [tiny.BEGIN, tiny.USER, *TOKENIZER.encode("hi").ids, tiny.USER, *TOKENIZER.encode("x").ids, tiny.ANSWER]
    wanted = TOKENIZER.decode(tiny.greedy_tokens(bundle, ids, 15))
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "max_completion_tokens": 15, "temperature": 0}
    found = client.chat.completions.create(**fields, logprobs=True, top_logprobs=2)
    assert found.choices[0].message.content == wanted
    assert found.choices[0].logprobs is not None
    assert [len(one.top_logprobs) for one in found.choices[0].logprobs.content or []] == [2] * 15
    parts = [part.choices[0].delta for part in client.chat.completions.create(**fields, stream=True)]
    assert parts[0].role == "assistant"
    assert "".join(part.content or "" for part in parts) == wanted


def test_reasoning_that_the_template_begins_is_no_content(client: openai.OpenAI, bundle: Path) -> None:
    fields: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 15, "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    ids = [tiny.BEGIN, tiny.USER, *TOKENIZER.encode("hi").ids, tiny.ANSWER, *TOKENIZER.encode("<think>\n").ids]
    wanted = TOKENIZER.decode(tiny.greedy_tokens(bundle, ids, 15)).strip()
    message: Any = client.chat.completions.create(**fields).choices[0].message
    assert (message.content, message.reasoning_content) == (None, wanted)
    parts: list[Any] = [part.choices[0].delta for part in client.chat.completions.create(**fields, stream=True)]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == wanted
    assert "".join(part.content or "" for part in parts) == ""
    earlier = [*fields["messages"], message.model_dump(), {"role": "user", "content": "and"}]
    again: Any = client.chat.completions.create(**{**fields, "messages": earlier, "extra_body": {}})
    assert again.choices[0].message.content


def test_biases_penalties_and_stop_tokens_decide_the_text(client: openai.OpenAI) -> None:
    (x,) = TOKENIZER.encode("x").ids
    assert _text(client, "a", most=5, logit_bias={str(x): 100}) == "xxxxx"
    stopped = client.completions.create(
        model="tiny", prompt="a", temperature=0, logit_bias={str(x): 100}, extra_body={"stop_token_ids": [x]}
    )
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    plain = _text(client, TEXTS[0], most=40)
    varied = _text(client, TEXTS[0], most=40, extra_body={"repetition_penalty": 50.0})
    assert len(set(TOKENIZER.encode(varied).ids)) > len(set(TOKENIZER.encode(plain).ids))
    single = client.completions.create(model="tiny", prompt=TEXTS[0], max_tokens=12, extra_body={"min_p": 1.0})
    assert single.choices[0].text == _text(client, TEXTS[0])


def test_several_prompts_and_choices_come_in_order(client: openai.OpenAI, bundle: Path) -> None:
    ids = [tiny.BEGIN, *TOKENIZER.encode(TEXTS[1]).ids]
    found = client.completions.create(model="tiny", prompt=[TEXTS[0], TEXTS[2]], n=2, max_tokens=6, temperature=0)
    wanted = [_greedy_text(bundle, text, 6) for text in (TEXTS[0], TEXTS[0], TEXTS[2], TEXTS[2])]
    assert [(one.index, one.text) for one in found.choices] == list(enumerate(wanted))
    assert _text(client, [ids]) == _text(client, ids) == _greedy_text(bundle, TEXTS[1], 12)
    drawn = client.completions.create(model="tiny", prompt="x", n=3, max_tokens=12, seed=1)
    again = client.completions.create(model="tiny", prompt="x", n=3, max_tokens=12, seed=1, stream=True)
    assert len({one.text for one in drawn.choices}) == 3
    texts = ["", "", ""]
    for part in again:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts == [one.text for one in drawn.choices]


def test_echo_returns_the_prompt_with_logprobs(client: openai.OpenAI) -> None:
    found = client.completions.create(model="tiny", prompt=TEXTS[1], echo=True, max_tokens=0, logprobs=1)
    (choice,) = found.choices
    assert choice.text == TEXTS[1]
    assert choice.logprobs is not None
    logprobs: list[Any] = list(choice.logprobs.token_logprobs or [])
    first, rest = logprobs[0], logprobs[1:]
    assert first is None, "the first token has no log probability"
    assert len(rest) == len(TOKENIZER.encode(TEXTS[1]).ids)
    assert all(one < 0 for one in rest)
    assert _text(client, "x", echo=True) == "x" + _text(client, "x")


def test_stop_strings_end_a_text_and_are_not_shown(client: openai.OpenAI) -> None:
    whole = _text(client, TEXTS[0], most=30)
    word = whole[9:11]
    found = client.completions.create(
        model="tiny", prompt=TEXTS[0], max_tokens=30, temperature=0, stop=[word, "never there"]
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == (whole[: whole.index(word)], "stop")
    parts = client.completions.create(
        model="tiny", prompt=TEXTS[0], max_tokens=30, temperature=0, stop=word, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == whole[: whole.index(word)]


def test_models_are_listed_and_named_by_version(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pipe"
    found = client.completions.create(model="tiny/versions/1", prompt="x", max_tokens=1)
    assert found.model == "tiny/versions/1"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "sentence"),
    [
        ({"model": "no"}, openai.NotFoundError, None, "no model 'no'; there are tiny"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix", "is not supported by this service"),
        ({"logit_bias": {"288": 1}}, openai.BadRequestError, "logit_bias", "288 is not a token id"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "logit_bias", "'x' is not a token id"),
        ({"extra_body": {"stop_token_ids": [288]}}, openai.BadRequestError, "stop_token_ids", "288 is not a token id"),
        ({"extra_body": {"min_p": 2}}, openai.BadRequestError, "min_p", "expected `float` <= 1"),
        ({"prompt": ""}, None, None, ""),
        ({"prompt": [9999]}, openai.BadRequestError, "prompt", "9999 is not a token id; the model's are 0 to 287"),
        ({"prompt": [5] * 4096}, openai.BadRequestError, "prompt", "4096 tokens; the model has 4096 positions"),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "more than the model's 4096 positions"),
        ({"n": 17}, openai.BadRequestError, "n", "1 prompts times 17 are more than 16 texts"),
        ({"extra_headers": {"x-request-timeout": "soon"}}, openai.BadRequestError, None, "is no number of seconds"),
    ],
)
def test_errors_have_openais_types(
    client: openai.OpenAI, fields: dict[str, Any], kind: Any, param: str | None, sentence: str
) -> None:
    whole: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}
    if kind is None:  # an empty prompt has the begin token
        assert client.completions.create(**whole).usage.prompt_tokens == 1
        return
    with pytest.raises(kind) as caught:
        client.completions.create(**whole)
    body: Any = caught.value.body
    assert sentence in body["message"]
    assert (body["type"], body["param"]) == ("invalid_request_error", param)


def test_unsupported_paths_name_the_supported_ones(server: Running) -> None:
    missing = httpx.post(f"{server.url}/openai/v1/responses", json={})
    assert missing.status_code == 404
    assert "completions, chat/completions, embeddings and models" in missing.json()["error"]["message"]
    fields = {"model": "tiny", "input": "x"}
    vectors = httpx.post(f"{server.url}/openai/v1/embeddings", json=fields)
    assert (vectors.status_code, vectors.json()["error"]["message"]) == (404, "model 'tiny' computes no embeddings")
    v1 = httpx.post(f"{server.url}/v1/models/tiny:predict", json={"instances": ["x"]})
    assert v1.status_code == 400
    assert "use /openai/v1/completions for texts" in v1.json()["error"]


def test_graph_serves_raw_tensors_over_v2(server: Running) -> None:
    ids = [[5, 6, 7]]
    inputs: list[dict[str, Any]] = [
        {"name": name, "shape": [1, 3], "datatype": "INT64", "data": data}
        for name, data in (("input_ids", ids), ("attention_mask", [[1, 1, 1]]), ("position_ids", [[0, 1, 2]]))
    ]
    inputs += [
        {"name": name, "shape": [1, tiny.HEADS, 0, tiny.WIDTH], "datatype": "FP32", "data": []} for name in tiny.CACHES
    ]
    found = httpx.post(f"{server.url}/v2/models/tiny/infer", json={"inputs": inputs, "outputs": [{"name": "logits"}]})
    assert found.status_code == 200, found.text
    assert found.json()["outputs"][0]["shape"] == [1, 3, tiny.VOCABULARY]


def test_openapi_document_describes_every_route(server: Running) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    named = {find_route(path, method.upper()).kind for path, item in document["paths"].items() for method in item}
    assert named == set(PATHS) - {"embeddings", "feedback"}
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stop": ["q"], "seed": None}
    answer = httpx.post(f"{server.url}/openai/v1/completions", json=fields)
    refusal = httpx.post(f"{server.url}/openai/v1/completions", json={**fields, "n": 0})
    for value, scheme in (
        (fields, "completions.Request"), (answer.json(), "completions.Answer"), (refusal.json(), "Error"),
    ):  # fmt: skip
        reference = {"$ref": f"#/components/schemas/texts.{scheme}", "components": document["components"]}
        jsonschema.validate(value, reference)
    assert len(answer.headers["x-bundle-digest"]) == 64


def _raw(server: Running, fields: dict[str, Any], version: bytes = b"1.1") -> socket.socket:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True, "temperature": 0, **fields}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    head = b"POST /openai/v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (version, len(body))
    sock.sendall(head + body)
    return sock


def test_disconnect_stops_generation(server: Running) -> None:
    before = _metric(server, 'pipe_tokens_total{direction="out"')
    with _raw(server, {"max_tokens": 4000}) as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    _wait_until(lambda: _metric(server, 'pipe_sequences{model="tiny",state="running"') == 0)
    assert _metric(server, 'pipe_tokens_total{direction="out"') - before < 4000
    assert _metric(server, 'pipe_requests_total{code="499"') >= 1


def test_http_1_0_client_gets_events_without_chunks(server: Running) -> None:
    with _raw(server, {"max_tokens": 3}, b"1.0") as sock:
        response = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, events = response.partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head
    assert b"transfer-encoding" not in head
    assert events.endswith(b"data: [DONE]\n\n")
    assert all(line.startswith(b"data: ") for line in events.split(b"\n\n")[:-1])


def test_deadline_gives_504_or_an_error_event(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "timeout": 30}
    fields["extra_headers"] = {"x-request-timeout": "0.1"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**fields)
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError, match="the deadline passed before the"):
        list(client.completions.create(**fields, stream=True))


def test_shutdown_lets_texts_finish(start: Launcher, bundle: Path) -> None:
    server = start(bundle)
    with _client(server) as client:
        wanted = _text(client, "x", most=300)
        stream = client.completions.create(model="tiny", prompt="x", temperature=0, stream=True, max_tokens=3000)
        text = next(stream).choices[0].text
        server.signal(signal.SIGTERM)
        server.wait_for("draining")
        parts = list(stream)
        text += "".join(part.choices[0].text for part in parts)
    assert text.startswith(wanted)
    assert parts[-1].choices[0].finish_reason == "length"
    assert server.process.wait(300) == 0


def test_chats_without_max_tokens_share_memory_for_one(start: Launcher, tmp_path: Path) -> None:
    """Each may take all positions of the model; a common system prompt is read once."""
    positions, position_bytes = 320, 4 * tiny.SIZE * len(tiny.CACHES)
    bundle = tiny.build(tmp_path / "bundle", positions=positions, end=())
    server = start(bundle, options=["--max-cache-bytes", str(2 * positions * position_bytes)])
    system = {"role": "system", "content": "the quick brown fox jumps over the lazy dog"}

    def chat(number: int) -> tuple[str, Any, str | None]:
        messages: Any = [system, {"role": "user", "content": f"hello {number}"}]
        fields: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "stream": True}
        parts = list(caller.chat.completions.create(**fields, stream_options={"include_usage": True}))
        text = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
        return text, parts[-1].usage, parts[-2].choices[0].finish_reason

    with _client(server) as caller, ThreadPoolExecutor(8) as pool:
        alone = [chat(number) for number in range(8)]
        assert _metric(server, "pipe_preemptions_total") == 0
        _wait_until(lambda: 0 < _metric(server, "pipe_prefix_cache_bytes") <= 2 * positions * position_bytes)
        together = list(pool.map(chat, range(8)))
    assert [(text, reason) for text, _, reason in together] == [(text, "length") for text, _, _ in alone]
    assert {usage.total_tokens for _, usage, _ in together} == {positions}
    assert _metric(server, "pipe_preemptions_total") > 0
    details = [usage.prompt_tokens_details.cached_tokens for _, usage, _ in alone]
    assert details[0] == 0
    assert 0 < _metric(server, "pipe_prefix_cache_hits_total") < _metric(server, "pipe_prefix_cache_queries_total")
    assert min(details[1:]) > 0
