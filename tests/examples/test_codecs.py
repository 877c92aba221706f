"""The gate compares the codec of every example with the test data: a damaged one is stopped before anything is served.

The models are untrained: the comparison is with what the model answers, right or wrong.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.cli.project import TEMPLATES
from pipeline.contract.codec import encode_method, load_codec
from pipeline.contract.config import load_config
from pipeline.contract.data import forward, open_split
from pipeline.contract.pretrained import copy_small_files, find_pretrained
from pipeline.contract.task import load_class, load_task, make_shared_files, served_model, serving_form
from pipeline.evaluate.codec_check import CodecCheck, check_codec
from pipeline.system.sources import SOURCE_ROOT

from .conftest import DEEPSEEK

LANGUAGE_MODELS = ("sft", "lora", "dpo")
Damage = Callable[[Any], Any]  # of a prediction


def each(value_type: type, change: Callable[[Any], Any]) -> Damage:
    """Return a damage of every value of this type in an answer, also in its lists and objects."""

    def damage(value: Any) -> Any:
        if type(value) is value_type or (value_type is float and type(value) is int):
            return change(value)
        if isinstance(value, Mapping):
            return {key: damage(part) for key, part in value.items()}
        return [damage(part) for part in value] if isinstance(value, list) else value

    return damage


def upside_down(text: str) -> str:
    picture = ImageOps.flip(Image.open(io.BytesIO(b64decode(text))))
    picture.save(file := io.BytesIO(), "PNG")
    return b64encode(file.getvalue()).decode()


def next_name(names: Sequence[str]) -> Callable[[str], str]:
    """Return what replaces each name in a text by the one after it; a picture is turned upside down."""

    def replaced(text: str) -> str:
        if len(text) > 100:
            return upside_down(text)
        words = re.split("( )", text) if text not in names else [text]
        return "".join(names[(names.index(word) + 1) % len(names)] if word in names else word for word in words)

    return replaced


NAMES = {
    "starter": ("barolo", "grignolino", "barbera"),
    "images": ("circle", "square", "triangle"),
    "text": ("bad", "good"),
    "transformer": ("bad", "good"),
    "sequence": ("O", "PERSON", "CITY", "DATE"),
    "speech": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
}
LANGUAGE_MODELS = ("sft", "lora", "dpo")
EXAMPLES = ("digits", "starter", *TEMPLATES)


def two_words(task: Any, files: Path) -> list[str]:
    """Return two tokens of the test data of a language model."""
    tokens = np.unique(open_split(task, "test").batch([0])[task.inputs[0]].numpy())[-2:].tolist()
    return [Tokenizer.from_file(str(files / "tokenizer.json")).decode([token]) for token in tokens]


def lies(names: Sequence[str]) -> dict[str, Lie]:
    """Return what a codec may do wrong in its answers, which have these names of labels."""
    return {
        "numbers with another sign": Lie(each(float, lambda number: -number)),
        "the rest to 1": Lie(each(float, lambda number: 1 - number)),
        "another name": Lie(each(str, next_name(names))),
        "lists in reverse": Lie(each(list, lambda values: values[::-1])),
        "lists shifted": Lie(each(list, lambda values: [*values[1:], *values[:1]])),
        "the least likely": Lie(before=lambda outputs: {key: -array for key, array in outputs.items()}),
        "columns shifted": Lie(before=lambda outputs: {key: np.roll(array, 1, -1) for key, array in outputs.items()}),
        "another sample's answer": Lie(order=lambda answers: [*answers[1:], *answers[:1]]),
    }


@dataclass(frozen=True)
class Lie:
    """A damage of each answer, of the outputs before, or of their order."""

    after: Damage = lambda answer: answer
    before: Damage = lambda outputs: outputs
    order: Damage = lambda answers: answers


def check(task: Any, codec: Any, predict: Any, files: Path) -> CodecCheck:
    return check_codec(task, codec, "codec.py:Codec", open_split(task, "test"), predict, files)


def predictor(task: Any, model: Any) -> Any:
    """Return a predictor that computes each batch once."""
    known: dict[bytes, Any] = {}

    def predict(batch: Mapping[str, Any]) -> Any:
        key = b"".join(batch[name].numpy().tobytes() + bytes(str(batch[name].shape), "ascii") for name in task.inputs)
        if key not in known:
            known[key] = forward(model, task, batch)
        return known[key]

    return predict


class Lying:
    """A codec whose answers are a lie, or, without one, whose arrays are shifted."""

    def __init__(self, codec: Any, lie: Lie | None) -> None:
        self._codec, self._lie = codec, lie
        self.is_other = False  # whether it answered otherwise

    def decode(self, instances: Any) -> Mapping[str, Any]:
        arrays: Mapping[str, Any] = self._codec.decode(instances)
        return arrays if self._lie else {name: np.roll(array, 1, axis=-1) for name, array in arrays.items()}

    def encode(self, outputs: Any, inputs: Any) -> list[Any]:
        encode = encode_method(self._codec, "codec.py:Codec")
        answers = list(encode(outputs, inputs))
        if self._lie is None:
            return answers
        changed: list[Any] = self._lie.order(list(map(self._lie.after, encode(self._lie.before(outputs), inputs))))
        self.is_other |= changed != answers
        return changed


def assert_codec_is_compared(
    task: Any, codec: Any, lies: Mapping[str, Lie], files: Path, build: Callable[[], Any] | None = None
) -> None:
    torch.manual_seed(0)
    model, task = served_model(task, (build or task.model)().eval()), serving_form(task)
    predict = predictor(task, model)
    shipped = check(task, codec, predict, files)
    assert shipped.rule("proven").passed, shipped.rule("proven").detail
    assert shipped.decoded and shipped.encoded and shipped.notes == ()
    assert check(task, Lying(codec, None), predict, files).rule().detail.startswith("decode()")
    lying_codecs = {name: Lying(codec, lie) for name, lie in lies.items()}
    stopped = {name for name, lying in lying_codecs.items() if not check(task, lying, predict, files).rule().passed}
    assert stopped == {name for name, lying in lying_codecs.items() if lying.is_other}
    assert len(stopped) >= 3


# Those of language models differ in little, and take 15 to 35 s.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LANGUAGE_MODELS else name for name in EXAMPLES]
)
@torch.no_grad()
def test_a_lying_codec_of_an_example_is_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SOURCE_ROOT / "examples" / name
    if name in TEMPLATES:
        folder = tmp_path / "project"
        CliRunner().invoke(app, ["init", str(folder), "--template", name], catch_exceptions=False)
    monkeypatch.chdir(folder)  # as the steps do, for the files in data/
    config = load_config(folder / "pipe.yaml")
    task: Any = load_task(config.task, folder)
    if pretrained := find_pretrained(config, folder):
        copy_small_files(pretrained, tmp_path / "files")
    make_shared_files(task, tmp_path / "files")
    codec = load_codec(config.codec, folder, files=tmp_path / "files")
    names = two_words(task, tmp_path / "files") if name in LANGUAGE_MODELS else NAMES.get(name, ())
    assert_codec_is_compared(task, codec, lies(names), tmp_path / "files")


def test_the_codec_of_pretraining_is_compared(pretrain: Any, tmp_path: Path) -> None:
    codec = load_class("codec.py:TextCodec", DEEPSEEK / "pretrain")(tmp_path / "files")
    all_lies = {
        "the second": Lie(lambda answer: {"next": answer["next"][1:]}),
        **lies(two_words(pretrain, tmp_path / "files")),
    }
    assert_codec_is_compared(pretrain, codec, all_lies, tmp_path / "files")


def test_a_tokenizer_with_two_tokens_exchanged_is_rejected(pretrain: Any, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "files", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    body = json.loads(file.read_text())
    vocabulary, (one, two) = body["model"]["vocab"], two_words(pretrain, tmp_path / "files")
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(body))
    codec = load_class("codec.py:TextCodec", DEEPSEEK / "pretrain")(tmp_path / "other")
    rule = check(pretrain, codec, predictor(pretrain, pretrain.model().eval()), tmp_path / "files").rule()
    assert "decode() makes values of a raw test instance that are not in its row" in rule.detail
