"""Mistakes with pretrained weights: the check step names the file and what it expected."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.contract.run import Run, RunFile
from pipeline.steps.check import check
from pipeline.system.errors import PipelineError

from .official import write_official

TASK = """
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoModelForCausalLM


class Language:
    inputs, outputs = ("input_ids",), ("logits",)

    def model(self):
        raise AssertionError("the pretrained one is adapted")

    def adapt(self, folder):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, use_cache=False))

    def data(self, split):
        kept = Path(__file__).with_name("long.npy" if split == "test" else "short.npy")
        return {"input_ids": np.load(kept) + {"train": 0, "validation": 1, "test": 2}[split]}

    def loss(self, outputs, batch):
        return outputs.mean()

    def metrics(self, outputs, batch):
        return {"mean": outputs.mean(dim=(1, 2))}
"""


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_official(tmp_path_factory.mktemp("official") / "llama", "llama")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 47}}}))
    return folder


@pytest.fixture
def project(tmp_path: Path, official: Path) -> Path:
    shutil.copytree(official, tmp_path / "llama")
    (tmp_path / "task.py").write_text(TASK)
    for name in ("short", "long"):
        np.save(tmp_path / f"{name}.npy", np.arange(16).reshape(2, 8))
    return tmp_path


@pytest.fixture(autouse=True)
def _only_what_is_known_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.steps.check._MOST_WEIGHTS", 0)


def run_check(root: Path) -> None:
    run = Run(root / "runs" / "one")
    run.partial("check").mkdir(parents=True)
    (root / "codec.py").write_text("class C:\n    def decode(self, x): ...\n    def encode(self, y): ...\n")
    config = {"name": "x", "task": "task.py:Language", "codec": "codec.py:C", "model": {"pretrained": "llama"}}
    file = RunFile(id="one", created="2026-01-01", wanted=("check",), config=config, environment={})
    (run.path / "run.json").write_text(file.model_dump_json())
    check(run, root)


def shard(root: Path) -> Path:
    return min((root / "llama").glob("*.safetensors"))


def change_config(root: Path, **settings: Any) -> None:
    path = root / "llama" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def unknown_architecture(root: Path) -> None:
    change_config(root, model_type="lama", architectures=["LamaForCausalLM"])


def other_tokenizer(root: Path) -> None:
    path = root / "llama" / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 48}}}))


def too_long(root: Path) -> None:
    np.save(root / "long.npy", np.zeros((2, 65), int))


def other_ids(root: Path) -> None:
    np.save(root / "short.npy", np.full((2, 8), 48))


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown architecture": (
        unknown_architecture,
        r"llama/config.json: .*has model type `lama` but Transformers does not recognize this architecture",
    ),
    "configuration": (
        lambda root: change_config(root, hidden_size="16"),
        r"llama/config.json: .*'hidden_size' expected int, got str \(value: '16'\)",
    ),
    "tokenizer": (other_tokenizer, r"files/tokenizer.json: its highest id is 48, but .* embedding has 48 rows"),
    "ids": (other_ids, r"data\('train'\): column `input_ids` has the id 48, but the model's embedding has 48 rows"),
    "positions": (too_long, r"data\('test'\): a text has 65 positions, but the model has 64 \(max_position_emb"),
    "no shard": (lambda root: shard(root).unlink(), r"index.json: model-00001.* is missing"),
}


def test_correct_folder_is_accepted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_check(project)
    assert "its data and settings were checked" in capsys.readouterr().out


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_reported_with_its_file(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_mistake, message = MISTAKES[name]
    make_mistake(project)
    with pytest.raises(PipelineError, match=message):
        run_check(project)
    assert "Traceback" not in "".join(capsys.readouterr())
