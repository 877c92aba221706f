"""The gate compares the codec of every example with the test data: a damaged one is stopped before anything is served.

The models are untrained: the comparison is with what the model answers, right or wrong.
"""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
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


def changed(key: str, change: Damage) -> Damage:
    return lambda prediction: {**prediction, key: change(prediction[key])}


def other(*names: str) -> Damage:
    """Return a damage that replaces each name by the one after it."""
    return lambda name: names[(names.index(name) + 1) % len(names)]


def upside_down(prediction: Mapping[str, str]) -> dict[str, str]:
    picture = ImageOps.flip(Image.open(io.BytesIO(b64decode(prediction["b64"]))))
    picture.save(file := io.BytesIO(), "PNG")
    return {"b64": b64encode(file.getvalue()).decode()}


TAGS = ("O", "PERSON", "CITY", "DATE")
DAMAGES: dict[str, tuple[Damage, ...]] = {
    "digits": (changed("digit", lambda digit: 9 - digit),),
    "starter": (changed("class", other("barolo", "grignolino", "barbera")),),
    "tabular": (changed("rent", lambda rent: -rent),),
    "ranking": (changed("score", lambda score: -score),),
    "images": (changed("class", other("circle", "square", "triangle")),),
    "text": (changed("class", other("bad", "good")),),
    "transformer": (changed("class", other("bad", "good")),),
    "speech": (changed("text", lambda text: f"{text} one"),),
    "sequence": (
        changed("tags", lambda tags: [other(*TAGS)(tag) for tag in tags]),
        changed("tags", lambda tags: [*tags[1:], *tags[:1]]),
    ),
    "embedding": (lambda vector: [-value for value in vector], lambda vector: [*vector[1:], *vector[:1]]),
    "forecast": (changed("forecast", lambda days: [*days[1:], *days[:1]]),),
    "image-to-image": (upside_down,),
    **dict.fromkeys(LANGUAGE_MODELS, (changed("token", lambda token: token + 1),)),
}


def check(task: Any, codec: Any, build: Callable[[], Any]) -> CodecCheck:
    torch.manual_seed(0)
    model, task = served_model(task, build().eval()), serving_form(task)
    return check_codec(
        task, codec, "codec.py:Codec", open_split(task, "test"), lambda batch: forward(model, task, batch)
    )


class Damaged:
    """A codec whose predictions are changed, or, without a damage of them, whose arrays are shifted."""

    def __init__(self, codec: Any, damage: Damage | None) -> None:
        self._codec, self._damage = codec, damage

    def decode(self, instances: Any) -> Mapping[str, Any]:
        arrays: Mapping[str, Any] = self._codec.decode(instances)
        return arrays if self._damage else {name: np.roll(array, 1, axis=-1) for name, array in arrays.items()}

    def encode(self, outputs: Any, inputs: Any) -> list[Any]:
        predictions = encode_method(self._codec, "codec.py:Codec")(outputs, inputs)
        return [self._damage(each) for each in predictions] if self._damage else list(predictions)


def assert_codec_is_compared(
    task: Any, codec: Any, damages: tuple[Damage, ...], build: Callable[[], Any] | None = None
) -> None:
    build = build or task.model
    shipped = check(task, codec, build)
    assert shipped.rule().passed, shipped.rule().detail
    assert shipped.decoded and shipped.encoded
    assert shipped.notes == ()
    for damage in (*damages, None):
        rule = check(task, Damaged(codec, damage), build).rule()
        assert not rule.passed
        assert rule.detail.startswith("decode()" if damage is None else "encode() answers")


def test_every_example_has_a_damaged_codec() -> None:
    assert sorted(DAMAGES) == sorted(["digits", "starter", *TEMPLATES])


# Those of language models differ in little, and take 15 to 35 s.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ("dpo", "lora", "sft") else name for name in DAMAGES]
)
@torch.no_grad()
def test_a_damaged_codec_of_an_example_is_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert_codec_is_compared(task, load_codec(config.codec, folder, files=tmp_path / "files"), DAMAGES[name])


def test_the_codec_of_pretraining_is_compared(pretrain: Any, tmp_path: Path) -> None:
    codec = load_class("codec.py:TextCodec", DEEPSEEK / "pretrain")(tmp_path / "files")
    assert_codec_is_compared(pretrain, codec, (lambda prediction: {"next": prediction["next"][1:]},))
