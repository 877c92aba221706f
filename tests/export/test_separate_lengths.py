"""A model that reads padding: the answer for an instance does not depend on the others in its request."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from export.__main__ import export
from pipeline.api import Bundle
from pipeline.contract.codec import join_equal_shapes
from pipeline.contract.run import Run, RunFile
from pipeline.system.files import digest_file, write_json
from serve.model_version import ModelVersion
from serve.protocol import v1, v2
from serve.request_context import RequestContext
from serve.runtime.loading import load_predictor
from tests.weights import save_weights

TASK = """
import numpy as np
from tags_codec import Codec
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(27, 6, padding_idx=0)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, letters):
        return self.head(self.gru(self.embed(letters))[0])


class Tags:
    inputs, outputs = ("letters",), ("tags",)
    axes = {"letters": ("batch", "time")}
    longest = {"time": 12}

    def model(self):
        return Net()

    def data(self, split):
        random = np.random.default_rng(0)
        words = ["".join(random.choice(list("abcdef"), size=3 + row % 6)) for row in range(20)]
        return Codec().decode(words)

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {"size": outputs[:, 0, 0].abs()}

    def example(self):
        return ["fade", "bed", "decade", "cab"]
"""
CODEC = """
import numpy as np


class Codec:
    def decode(self, instances):
        letters = np.zeros((len(instances), max(map(len, instances))), np.int64)
        for row, word in zip(letters, instances):
            row[: len(word)] = [ord(letter) - 96 for letter in word]
        return {"letters": letters}

    def encode(self, outputs, inputs):
        rows = zip(outputs["tags"], inputs["letters"], strict=True)
        return [row[letters > 0].tolist() for row, letters in rows]
"""
WORDS = ["deface", "bad", "facade", "fed", "ab", "accede"]


class Tagger(nn.Module):
    """The parameters of the task's model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(27, 6, padding_idx=0)
        self.gru = nn.GRU(6, 5, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)


def run_of(root: Path, weights: nn.Module) -> Run:
    (root / "tags_task.py").write_text(TASK)
    (root / "tags_codec.py").write_text(CODEC)
    run = Run(root / "runs" / "run-0")
    for step in ("prepare", "train", "evaluate"):
        run.output(step).mkdir(parents=True)
    run.partial("export").mkdir()
    config = {"name": "tags", "task": "tags_task.py:Tags", "codec": "tags_codec.py:Codec"}
    settings: dict[str, Any] = {**config, "evaluate": {"metric": "size"}, "export": {"batch_sizes": [1, 4]}}
    file = RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=settings, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    write_json(run.output("prepare") / "data.json", {})
    write_json(run.output("prepare") / "profile.json", {"columns": {}})
    save_weights(weights.state_dict(), run.output("train") / "model.safetensors")
    checkpoint = digest_file(run.output("train") / "model.safetensors")
    body = {"verdict": "pass", "checkpoint": checkpoint, "summary": "size is 1", "rules": []}
    write_json(run.output("evaluate") / "verdict.json", body)
    return run


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("tags")
    torch.manual_seed(0)
    run = run_of(root, Tagger())
    export(run, root)
    return Bundle.load(run.partial("export") / "bundle")


@pytest.fixture(scope="module")
def alone(bundle: Bundle) -> list[Any]:
    return [bundle.predict([word])[0] for word in WORDS]


def answer(bundle: Bundle, payload: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        version = ModelVersion("tags", "1", load_predictor(bundle, None, None), pool)
        return asyncio.run(version.predict(RequestContext({}, "/"), payload))


def test_padding_would_change_answers(bundle: Bundle, alone: list[Any]) -> None:
    assert bundle.signature.separate_lengths
    padded = bundle._predictor._decode_part(WORDS)
    tags = bundle._predictor.run(padded)["tags"]
    assert np.abs(tags[1, :3] - np.array(alone[1])).max() > 0.01


def test_predictions_do_not_depend_on_the_other_instances(bundle: Bundle, alone: list[Any]) -> None:
    for found, expected in zip(bundle.predict(WORDS), alone, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_v1_and_v2_answers_do_not_depend_on_the_other_instances(bundle: Bundle, alone: list[Any]) -> None:
    body = {"inputs": [{"name": "instances", "datatype": "BYTES", "shape": [len(WORDS)], "data": WORDS}]}
    first = json.loads(answer(bundle, v1.Payload(json.dumps({"instances": WORDS}).encode())))["predictions"]
    written = json.loads(answer(bundle, v2.Payload("tags", json.dumps(body).encode(), None, None)).body)
    for answers in (first, [json.loads(text) for text in written["outputs"][0]["data"]]):
        for found, expected in zip(answers, alone, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_golden_predictions_are_those_of_instances_sent_alone(bundle: Bundle) -> None:
    golden = bundle.golden()
    for instance, expected in zip(golden.instances, golden.predictions, strict=True):
        np.testing.assert_allclose(bundle.predict([instance])[0], expected, atol=1e-6)


def test_instances_of_one_shape_run_together() -> None:
    decoded = [{"letters": np.full((1, length), length)} for length in (3, 5, 3, 2, 5)]
    parts = join_equal_shapes(decoded, ["letters"])
    assert [list(part.positions) for part in parts] == [[0, 2], [1, 4], [3]]
    assert [part.arrays["letters"].shape for part in parts] == [(2, 3), (2, 5), (1, 2)]
