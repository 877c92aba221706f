"""Pretrained weights from prepare to evaluate, as real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.contract.pretrained import Pretrained, open_pretrained
from pipeline.contract.run import Run, RunFile
from pipeline.system.errors import DataError, read_error
from pipeline.system.files import digest_file
from pipeline.system.processes import Rank
from train.pretrained.load import check_recorded
from train.process_group import ProcessGroup

from ...fork_server import launch
from ..conftest import failure, journal, weights
from .folders import write_folder

TASK = """
import json

import numpy as np
import torch
from torch import nn


class Tiny:
    inputs = ("x",)
    outputs = ("y",)
    counts = {"train": 37, "validation": 11, "test": 5}

    def model(self):
        raise AssertionError("the pretrained one is adapted")

    def adapt(self, folder):
        width = json.loads((folder / "config.json").read_text())["hidden_size"]
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

    def data(self, split):
        x = np.random.default_rng(len(split)).normal(size=(self.counts[split], 3)).astype(np.float32)
        return {"x": x, "target": np.sin(x.sum(axis=1, keepdims=True)), "index": np.arange(len(x))}

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"closeness": -(outputs - batch["target"]).abs()[:, 0]}
"""
CODEC = """
class C:
    def decode(self, instances):
        raise AssertionError("training decodes no requests")

    def encode(self, outputs):
        return outputs["y"].tolist()
"""
STATE = {"0.weight": torch.full((8, 3), 0.25), "0.bias": torch.linspace(-1, 1, 8), "2.weight": torch.full((1, 8), 0.5)}
ALLOW = ["2.bias"]


class PretrainedProject:
    """A project with a folder of weights."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "task.py").write_text(TASK)
        (root / "codec.py").write_text(CODEC)
        self.weights = write_folder(root / "tiny", STATE, config={"model_type": "llama", "hidden_size": 8})
        (self.weights / "tokenizer.json").write_text("{}")

    def run(self, name: str = "one", **model: Any) -> Run:
        run = Run(self.root / "runs" / name)
        run.path.mkdir(parents=True)
        settings = {"epochs": 2, "batch_size": 10, "lr": 0.02, "device": "cpu", "log_every": 1, "timeout_seconds": 20}
        config = {
            "name": "tiny",
            "task": "task.py:Tiny",
            "codec": "codec.py:C",
            "evaluate": {"metric": "closeness"},
            "train": {**settings, "strategy": "fsdp", "checkpoint_every": 2, "keep_checkpoints": 9},
            "model": {"pretrained": "tiny", "allow_mismatch": ALLOW, **model},
        }
        file = RunFile(id=name, created="2026-01-01", wanted=("train",), config=config, environment={})
        (run.path / "run.json").write_text(file.model_dump_json())
        return run

    def step(self, module: str, run: Run, processes: int = 1) -> str:
        done = launch(("-m", module, str(run.path)), self.root, processes, {"PIPE_PARENT_WATCH": "0"})
        return done.stdout + done.stderr

    def prepare(self, **model: Any) -> Run:
        run = self.run(**model)
        assert "digest" in self.step("pipeline.steps.prepare", run)
        run.partial("prepare").rename(run.output("prepare"))
        return run


@pytest.fixture
def project(tmp_path: Path) -> PretrainedProject:
    return PretrainedProject(tmp_path)


def test_prepare_copies_small_files_and_records_digests(project: PretrainedProject) -> None:
    run = project.prepare()
    kept = run.output("prepare") / "files"
    assert {path.name for path in kept.iterdir()} == {"config.json", "tokenizer.json"}
    recorded = json.loads((run.output("prepare") / "pretrained.json").read_text())
    weights = project.weights / "model.safetensors"
    assert recorded["files"]["model.safetensors"] == {"sha256": digest_file(weights), "bytes": weights.stat().st_size}
    report = json.loads((run.output("prepare") / "data.json").read_text())
    assert report["pretrained"] == recorded["digest"]
    assert report["files"]["config.json"] == recorded["files"]["config.json"]["sha256"]


def test_mismatch_stops_the_pipeline_before_training(project: PretrainedProject) -> None:
    run = project.run(allow_mismatch=["3.*"])
    project.step("pipeline.steps.check", run)
    error = read_error(run.partial("check"))
    assert isinstance(error, DataError)
    assert "missing: 2.bias [1], in no file" in str(error)


def test_training_starts_from_the_weights_and_resumes_without_them(project: PretrainedProject) -> None:
    run = project.prepare()
    assert "starting from tiny, digest" in project.step("train", run, 2)
    whole = weights(run)
    first = journal(run)[0]["loss"]
    assert first == pytest.approx(first_loss(), rel=0.3), "the loss of the weights, after a step or two"
    kept = run.partial("train") / "checkpoints"
    for path in kept.iterdir():
        if int(path.name[5:]) > 4:
            shutil.rmtree(path)
    shutil.rmtree(project.weights)
    (run.partial("train") / "model.safetensors").unlink()
    assert "resumed from the checkpoint of step 4" in project.step("train", run, 2)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(run).items())
    run.partial("train").rename(run.output("train"))
    assert "no-baseline" in project.step("pipeline.evaluate", run)


def first_loss() -> float:
    scope: dict[str, Any] = {}
    exec(TASK, scope)
    task = scope["Tiny"]()
    batch = {name: torch.as_tensor(column) for name, column in task.data("train").items()}
    x = torch.tanh(batch["x"] @ STATE["0.weight"].T + STATE["0.bias"])
    return float(task.loss(x @ STATE["2.weight"].T, batch))


def test_training_refuses_changed_weights(project: PretrainedProject) -> None:
    run, path = project.prepare(), project.weights / "model.safetensors"
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    project.step("train", run)
    assert (
        str(failure(run))
        == f"{path}: changed since prepare recorded it; to fix it: `pipe run all`, which prepares the files again"
    )


def test_every_difference_from_the_record_is_reported(project: PretrainedProject) -> None:
    path, alone = project.weights / "model.safetensors", ProcessGroup(Rank(), torch.device("cpu"))
    before = {name: entry(file) for name, file in open_pretrained(project.weights).files.items()}
    check_recorded(open_pretrained(project.weights), before, alone)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    (project.weights / "config.json").write_text('{"model_type": "llama", "hidden_size": 9}')
    (project.weights / "tokenizer_config.json").write_text("{}")
    (project.weights / "tokenizer.json").unlink()
    messages = []
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        recorded = {other: file for other, file in before.items() if other == name}
        pretrained = open_pretrained(project.weights)
        only = Pretrained(pretrained.folder, {n: p for n, p in pretrained.files.items() if n == name}, {})
        with pytest.raises(DataError) as caught:
            check_recorded(only, recorded, alone)
        messages.append(str(caught.value))
    assert "config.json: changed since" in messages[0]
    assert f"model.safetensors: {size - 4} bytes, {size} when prepare recorded it" in messages[1]
    assert "tokenizer.json: missing since" in messages[2]
    assert "tokenizer_config.json: new since" in messages[3]


def entry(file: Path) -> dict[str, Any]:
    return {"sha256": digest_file(file), "bytes": file.stat().st_size}


def test_task_without_adapt_is_refused(project: PretrainedProject) -> None:
    path = project.root / "task.py"
    path.write_text(path.read_text().replace("def adapt", "def other"))
    run = project.run()
    project.step("pipeline.steps.check", run)
    assert "task.py:Tiny: has no method adapt(folder)" in str(read_error(run.partial("check")))
