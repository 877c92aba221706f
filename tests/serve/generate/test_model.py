from __future__ import annotations

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
from pipeline.contract.errors import BundleError, InvalidPayload
from serve.generate.engine import Engine
from serve.generate.model import Words, Writer
from serve.generate.openai_api import conversation
from serve.generate.tokenizer import Language
from serve.loading import prove
from tests.serve.generate import tiny


def test_an_honest_model_may_write_many_texts_at_once(words: Words) -> None:
    assert words.why_alone == ""


def test_of_a_model_that_hears_strangers_each_text_is_written_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = open_bundle(tiny.build(tmp_path / "bundle", leak=0.3))
    found = prove(bundle, None, None).words
    assert found is not None
    assert "of a text has other logits in company than alone" in found.why_alone
    assert "texts=one-by-one" in caplog.text
    assert Writer(found, bundle, pool=None).engine.rules.rows == 1  # type: ignore[arg-type]


@pytest.fixture
def spoiled(tiny_path: Path, tmp_path: Path, seal: Callable[[Path], str]) -> Callable[..., Path]:
    def spoil(file: str, change: Callable[[Any], Any]) -> Path:
        path = Path(shutil.copytree(tiny_path, tmp_path / "bundle"))
        (path / file).write_text(change((path / file).read_text()))
        seal(path)
        return path

    return spoil


def _generation(**told: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        body = json.loads(text)
        body["generation"] |= told
        return json.dumps(body)

    return change


def _grown(text: str) -> str:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_tokens([f"<{number}>" for number in range(tiny.VOCABULARY)])
    return str(tokenizer.to_str())


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("files/tokenizer.json", lambda _: "{}", "not a tokenizer of the package tokenizers"),
        ("signature.json", _generation(tokenizer="files/none.json"), "the bundle does not hold it"),
        ("signature.json", _generation(tokenizer="../tokenizer.json"), "the bundle does not hold it"),
        ("signature.json", _generation(end=[288]), "id 288 of generation is none of the 288 tokens"),
        ("signature.json", _generation(template="{% if %}"), "the chat template is no Jinja"),
        ("files/tokenizer.json", _grown, "the tokenizer belongs to another model"),
    ],
)
def test_words_that_do_not_fit_the_model_stop_the_start(
    spoiled: Callable[..., Path], file: str, change: Callable[[str], str], sentence: str
) -> None:
    bundle = open_bundle(spoiled(file, change))
    with pytest.raises(BundleError, match=sentence):
        Language.open(bundle)


def test_texts_begin_with_what_every_text_begins_with(words: Words) -> None:
    plain = words.language.prompt("hello")
    assert plain[0] == tiny.BEGIN
    assert words.language.prompt("<s>hello") == plain, "once is enough"
    assert words.language.conversation([{"role": "user", "content": "x"}])[:2] == [tiny.BEGIN, tiny.USER]


def test_a_text_that_can_never_fit_is_not_even_read(words: Words) -> None:
    with pytest.raises(InvalidPayload, match="prompt: 100000 characters are more than the model's 96 positions"):
        words.language.prompt("x" * 100_000)


ASKED = conversation(b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}]}')


@pytest.fixture
def writer(words: Words, tiny_path: Path, pool: Executor) -> Writer:
    """With memory for one text of 20 positions."""
    made = Writer(words, open_bundle(tiny_path), pool)
    rules = replace(made.engine.rules, cache_bytes=made.engine.room.bytes(1, 20))
    made.engine = Engine(words.graph, rules, pool)
    return made


def test_an_answer_that_may_be_as_long_as_there_is_room_fits_in_memory_too(writer: Writer) -> None:
    """Else whoever names no length were refused, always, by a model with more positions than the memory holds."""
    assert writer.order(ASKED, [[tiny.BEGIN] * 8]).most == 12


def test_a_prompt_that_leaves_no_memory_for_an_answer_is_refused(writer: Writer) -> None:
    with pytest.raises(InvalidPayload, match="may take 21 positions; the service has memory for 20"):
        writer.order(ASKED, [[tiny.BEGIN] * 20])
