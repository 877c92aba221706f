from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipeline.contract.bundle import open_bundle
from pipeline.system.errors import BundleError, InvalidPayload
from serve.llm.engine import Engine
from serve.llm.model import LanguageModel, ModelTokenizer, TextGenerator
from serve.llm.openai_api import parse_chat, parse_completion
from serve.runtime.loading import load_predictor
from tests.serve.llm import tiny


def test_independent_rows_allow_batching(language_model: LanguageModel) -> None:
    assert language_model.unbatched_reason == ""


def test_rows_that_influence_each_other_disable_batching(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = open_bundle(tiny.build(tmp_path / "bundle", leak=0.3))
    found = load_predictor(bundle, None, None).language_model
    assert isinstance(found, LanguageModel)
    assert "differ by" in found.unbatched_reason
    assert "texts=one-by-one" in caplog.text
    assert TextGenerator(found, bundle, pool=None).engine.limits.sequences == 1  # type: ignore[arg-type]


@pytest.fixture
def spoiled(tiny_path: Path, tmp_path: Path, seal: Callable[[Path], str]) -> Callable[..., Path]:
    def spoil(file: str, change: Callable[[Any], Any]) -> Path:
        path = Path(shutil.copytree(tiny_path, tmp_path / "bundle", dirs_exist_ok=True))
        (path / file).write_text(change((path / file).read_text()))
        seal(path)
        return path

    return spoil


def _generation(**options: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        body = json.loads(text)
        body["generation"] |= options
        return json.dumps(body)

    return change


def _grown(text: str) -> str:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens([f"<{number}>" for number in range(tiny.VOCABULARY)])
    return str(tokenizer.to_str())


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("files/tokenizer.json", lambda _: "{}", "not a file of the package tokenizers"),
        ("signature.json", _generation(tokenizer="files/none.json"), "the bundle does not contain it"),
        ("signature.json", _generation(tokenizer="../tokenizer.json"), "the bundle does not contain it"),
        ("signature.json", _generation(end=[288]), "token id 288 in generation is not in the vocabulary of 288 tokens"),
        ("signature.json", _generation(template="{% if %}"), "the chat template is not valid Jinja"),
        ("files/tokenizer.json", _grown, "the tokenizer belongs to another model"),
    ],
)
def test_tokenizer_that_does_not_fit_the_model_is_rejected(
    spoiled: Callable[..., Path], file: str, change: Callable[[str], str], sentence: str
) -> None:
    bundle = open_bundle(spoiled(file, change))
    with pytest.raises(BundleError, match=sentence):
        ModelTokenizer.open(bundle)


def test_generation_blocks_render_their_content(spoiled: Callable[..., Path]) -> None:
    marked = tiny.TEMPLATE.replace(
        "{{ message['content'] }}", "{% generation %}{{ message.content }}{% endgeneration %}"
    )
    plain, blocks = (
        ModelTokenizer.open(open_bundle(spoiled("signature.json", _generation(template=template)))).encode_chat(
            [{"role": "user", "content": "hello"}]
        )
        for template in (tiny.TEMPLATE, marked)
    )
    assert blocks == plain


def test_reasoning_tags_are_text_also_where_they_are_special_tokens(spoiled: Callable[..., Path]) -> None:
    def rename(text: str) -> str:
        return text.replace("<|user|>", "<think>").replace("<|answer|>", "</think>")

    tokenizer = ModelTokenizer.open(open_bundle(spoiled("files/tokenizer.json", rename)))
    assert tokenizer.encode("<think>")[1:] == [tiny.USER]
    assert tokenizer.text(tokenizer.encode("<think>x</think>y")) == "<think>x</think>y"


def test_prompts_begin_with_the_begin_tokens_once(language_model: LanguageModel) -> None:
    plain = language_model.tokenizer.encode("hello")
    assert plain[0] == tiny.BEGIN
    assert language_model.tokenizer.encode("<s>hello") == plain, "begin tokens are not repeated"
    assert language_model.tokenizer.encode_chat([{"role": "user", "content": "x"}])[:2] == [tiny.BEGIN, tiny.USER]


def test_overlong_prompt_is_rejected_before_encoding(language_model: LanguageModel) -> None:
    with pytest.raises(InvalidPayload, match="prompt: 100000 characters do not fit in the model's 96 positions"):
        language_model.tokenizer.encode("x" * 100_000)


REQUEST = parse_chat(b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}')


@pytest.fixture
def generator(language_model: LanguageModel, tiny_path: Path, pool: Executor) -> TextGenerator:
    """A generator with memory for one sequence of 20 positions."""
    made = TextGenerator(language_model, open_bundle(tiny_path), pool)
    limits = replace(made.engine.limits, cache_bytes=made.engine.cache_budget.bytes([20]))
    made.engine = Engine(language_model.graph, limits, pool)
    return made


def test_default_length_of_a_chat_fits_in_memory(generator: TextGenerator) -> None:
    """Otherwise a model with more positions than fit in memory would reject every chat without max_tokens."""
    assert generator.options(REQUEST, [[tiny.BEGIN] * 8]).max_tokens == 12


def test_prompt_without_memory_for_an_answer_is_rejected(generator: TextGenerator) -> None:
    with pytest.raises(InvalidPayload, match="may take 21 positions; the service has memory for 20"):
        generator.options(REQUEST, [[tiny.BEGIN] * 20])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ["a"] * 4, "n": 5}, "n: 4 prompts times 5 are more than 16 texts"),
        ({"prompt": [-1]}, "prompt: -1 is not a token id; the model's are 0 to 287"),
        ({"prompt": [288]}, "prompt: 288 is not a token id"),
        (
            {"prompt": [1] * 8, "max_tokens": 89},
            "max_tokens: 8 tokens of the prompt and 89 of the answer are more than",
        ),
    ],
)
def test_request_beyond_what_the_model_has_is_rejected(
    language_model: LanguageModel, tiny_path: Path, pool: Executor, fields: dict[str, Any], sentence: str
) -> None:
    generator = TextGenerator(language_model, open_bundle(tiny_path), pool)
    request = parse_completion(json.dumps({"model": "tiny", **fields}).encode())
    with pytest.raises(InvalidPayload, match=sentence):
        generator.options(request, asyncio.run(generator.encode_prompts(request)))
