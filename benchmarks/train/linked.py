"""One process of the link table: trains until the validation loss is low enough, and prints what that took."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.train.gate import Finished
from benchmarks.train.workloads import Synthetic
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.process_group import join_process_group
from train.state import Progress
from train.trainer import Trainer
from train.validation import validate

LOOK_EVERY = 64 * 32  # samples between two looks at the validation loss
SETTINGS = {
    "epochs": 100,
    "batch_size": 64,
    "schedule": "constant",
    "warmup_ratio": 0,
    "device": "cpu",
    "checkpoint_every": 0,
}


class Teacher(Synthetic):
    """Learn the outputs of a fixed random net: 1.6 million parameters, little computation: the link dominates."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1216), nn.ReLU(), nn.Linear(1216, 1216), nn.ReLU(), nn.Linear(1216, 10))

    def data(self, split: str) -> dict[str, Tensor]:
        x = torch.randn(1 << 16 if split == "train" else 512, 64, generator=torch.Generator().manual_seed(len(split)))
        weights = torch.Generator().manual_seed(0)
        first_layer, second_layer = torch.randn(64, 8, generator=weights), torch.randn(8, 10, generator=weights)
        return {"x": x, "target": (torch.tanh(x @ first_layer / 8) @ second_layer).argmax(dim=1)}


class Racing(Trainer):
    """Looks at the validation loss every few steps; every process ends at the same look."""

    target = 0.0
    limit_seconds = 0.0
    began = 0.0
    last_look: dict[str, Any]

    def _step(self, step: int) -> None:
        self.began = self.began or time.perf_counter()
        super()._step(step)
        if (step + 1) * self.order.batch_size % LOOK_EVERY == 0:
            loss = validate(self._task, self.strategy, self._validation, self._group, 256)["loss"]
            seconds: float = self._group.share(time.perf_counter() - self.began)
            self.last_look = {"steps": step + 1, "seconds": seconds, "loss": loss, "reached": loss <= self.target}
            if loss <= self.target or seconds > self.limit_seconds:
                raise Finished


def main(train: dict[str, Any], target: float, limit_seconds: float) -> None:
    body = {"name": "link", "task": "task.py:T", "codec": "codec.py:C", "train": {**SETTINGS, **train}}
    config = parse_config(body, source="the bench")
    rank, task = Rank.from_env(), Teacher()
    assert config.train.batch_size != "auto"
    with tempfile.TemporaryDirectory() as folder, join_process_group(config.train, rank, Path(folder)) as group:
        splits = open_split(task, "train"), open_split(task, "validation")
        trainer = Racing(task, config, group, *splits, config.train.batch_size)
        trainer.target, trainer.limit_seconds = target, limit_seconds
        try:
            trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None)  # ends before its first one
        except Finished:
            sent = trainer.strategy.traffic.sent_bytes / trainer.last_look["steps"]
            if rank.first:
                print(json.dumps({**trainer.last_look, "sent_bytes_per_step": sent}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)  # a process that joined gloo may hang when it is taken down
