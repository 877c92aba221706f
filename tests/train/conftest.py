"""A tiny project whose run is trained by real processes, as `pipe` starts them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.contract.data import Samples, fingerprint
from pipeline.contract.run import Run, RunFile
from pipeline.system.errors import PipelineError, read_error
from pipeline.system.files import write_json

from ..fork_server import launch

# 37 training samples, a number that no batch and no world divides; tanh keeps every gradient smooth.
TASK = """
import numpy as np
import torch
from torch import nn


class Tiny:
    inputs = ("x",)
    outputs = ("y",)
    counts = {"train": 37, "validation": 11, "test": 5}

    def model(self):
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def data(self, split):
        x = np.random.default_rng(len(split)).normal(size=(self.counts[split], 3)).astype(np.float32)
        return {"x": x, "target": np.sin(x.sum(axis=1, keepdims=True)), "index": np.arange(len(x))}

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"closeness": -(outputs - batch["target"]).abs()[:, 0]}
"""

DEFAULTS = {"epochs": 3, "batch_size": 8, "lr": 0.02, "device": "cpu", "log_every": 1, "timeout_seconds": 20}


@dataclass(frozen=True)
class Project:
    root: Path

    def run(self, name: str = "one", **train: Any) -> Run:
        """A run that is prepared and waits for training."""
        run = Run(self.root / "runs" / name)
        run.path.mkdir(parents=True)
        config = {
            "name": "tiny",
            "task": "task.py:Tiny",
            "codec": "codec.py:C",
            "train": {**DEFAULTS, **train},
            "evaluate": {"metric": "closeness"},
        }
        file = RunFile(id=name, created="2026-01-01", wanted=("train",), config=config, environment={})
        (run.path / "run.json").write_text(file.model_dump_json())
        run.output("prepare").mkdir()
        write_json(run.output("prepare") / "data.json", {"splits": self._splits()})
        return run

    def replace(self, old: str, new: str) -> None:
        path = self.root / "task.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def train(self, run: Run, processes: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
        return launch(("-m", "train", str(run.path)), self.root, processes, {"PIPE_PARENT_WATCH": "0", **env})

    def _splits(self) -> dict[str, Any]:
        scope: dict[str, Any] = {}
        exec((self.root / "task.py").read_text(), scope)
        task = scope["Tiny"]()
        splits = {name: Samples(name, task.data(name), getattr(task, "collate", None)) for name in task.counts}
        return {name: {"fingerprint": fingerprint(one), "samples": len(one)} for name, one in splits.items()}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "task.py").write_text(TASK)
    return Project(tmp_path)


def weights(run: Run) -> dict[str, Tensor]:
    return load_file(run.partial("train") / "model.safetensors")


def journal(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.partial("train") / "metrics.jsonl").read_text().splitlines()]


def failure(run: Run) -> PipelineError:
    found = read_error(run.partial("train"))
    assert found is not None
    return found


def equal(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
