"""The export step on a language model: from its checkpoint to a bundle that a server accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from export.__main__ import export
from pipeline.contract.bundle import open_bundle
from pipeline.contract.run import Run, RunFile
from pipeline.contract.task import SHARED_FOLDER, shared_file_digests
from pipeline.system.files import digest_file, write_json
from pipeline.verify import verify_bundle
from tests.weights import save_weights

from .languages import WORDS, causal, tokenizer

TASK = """
import numpy as np
from pipeline.contract.signature import Prompting
from tests.export.llm.languages import COUNT, LENGTH, WORDS, causal


class Talk:
    inputs = ("input_ids", "attention_mask")
    outputs = ("logits",)

    def make_files(self, folder):
        raise AssertionError("prepare is not run here")

    def use_files(self, folder):
        assert (folder / "tokenizer.json").is_file()

    def model(self):
        return causal("Llama")

    def data(self, split):
        ids = np.random.default_rng(3).integers(0, WORDS, size=(COUNT, LENGTH))
        mask = np.arange(LENGTH) >= np.arange(COUNT)[:, None] % 4
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {"size": -outputs[:, 0, 0].abs()}

    def language_model(self, model):
        return model

    def prompting(self):
        return Prompting(end=(0,), template="{{ messages[0].content }}", positions_limit=32)

    def example(self):
        return ["w1 w2 w3", "w9"]
"""

CODEC = """
import json

import numpy as np


class TalkCodec:
    files = ("tokenizer.json",)

    def __init__(self, folder):
        self.words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]

    def decode(self, instances):
        rows = [[self.words[word] for word in text.split()] for text in instances]
        width = max(map(len, rows))
        ids, mask = (np.zeros((len(rows), width), np.int64) for _ in range(2))
        for index, row in enumerate(rows):
            ids[index, width - len(row):], mask[index, width - len(row):] = row, 1
        past = {f"past.0.{name}": np.zeros((len(rows), 2, 0, 4), np.float32) for name in ("key", "value")}
        positions = np.maximum(mask.cumsum(1) - 1, 0)
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}

    def encode(self, outputs):
        return [int(row[-1].argmax()) for row in outputs["logits"]]
"""


def evaluated_run(root: Path) -> Run:
    run = Run(root / "runs" / "one")
    for step in ("prepare", "train", "evaluate"):
        run.output(step).mkdir(parents=True)
    run.partial("export").mkdir()
    config = {"name": "talk", "task": "talk_task.py:Talk", "codec": "talk_codec.py:TalkCodec"}
    file = RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=config, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    tokenizer(run.output("prepare") / SHARED_FOLDER)
    write_json(
        run.output("prepare") / "data.json", {"files": shared_file_digests(run.output("prepare") / SHARED_FOLDER)}
    )
    write_json(run.output("prepare") / "profile.json", {"columns": {}})
    weights = run.output("train") / "model.safetensors"
    save_weights(causal("Llama").state_dict(), weights)
    verdict: dict[str, Any] = {"verdict": "pass", "summary": "", "checkpoint": digest_file(weights), "rules": []}
    write_json(run.output("evaluate") / "verdict.json", verdict)
    return run


@pytest.mark.long
def test_language_model_is_exported_to_a_verified_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "talk_task.py").write_text(TASK)
    (tmp_path / "talk_codec.py").write_text(CODEC)
    run = evaluated_run(tmp_path)
    export(run, tmp_path)
    bundle = open_bundle(run.partial("export") / "bundle")
    assert bundle.signature.generation is not None
    assert bundle.signature.generation.positions_limit == 32
    assert bundle.signature.limits.axes == {"sequence": 32, "total": 32}
    assert bundle.golden().predictions
    assert bundle.golden().generated
    assert list(verify_bundle(bundle.path))[-1] == "golden requests are answered as at export"
    parity = json.loads((run.partial("export") / "parity.json").read_text())
    assert parity["greedy"]["ties"] == 0
    assert [one["beyond_tolerance"] for one in parity["runs"]] == [0] * 8
    assert f"greedy answers to 4 prompts are torch's, {parity['greedy']['tokens']} tokens" in capsys.readouterr().out
    assert bundle.signature.outputs[0].shape[-1] == WORDS
