"""Trace one warm training step: which of our files it passes, in order, and how many of our functions it calls.

Run it as `python -m benchmarks.trace_step`. The model is small, the process is alone, and its data is in memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.processes import Rank
from train.ledger import Ledger
from train.process_group import ProcessGroup
from train.trainer import Trainer

ROOT = Path(__file__).parents[1]
WARM_STEP = 3


class Line:
    """A task: fit a line."""

    inputs = ("x",)
    outputs = ("y",)

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def data(self, split: str) -> dict[str, Tensor]:
        x = torch.randn(64 if split == "train" else 16, 3, generator=torch.Generator().manual_seed(0))
        return {"x": x, "target": x.sum(1, keepdim=True)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"error": (outputs - batch["target"]).abs()[:, 0]}


class Trace:
    """Our functions of one step, as `sys.setprofile` reports them."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.returns = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(ROOT) or "site-packages" in path.parts or path == Path(__file__):
            return
        name = path.relative_to(ROOT).as_posix()
        if event == "call" and name not in self.files:
            self.files.append(name)
        self.returns += event == "return"


def trace_step() -> Trace:
    settings = {"epochs": 1, "batch_size": 8, "device": "cpu", "checkpoint_every": 0, "log_every": 1000}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": settings}, source="trace")
    task, group, trace = Line(), ProcessGroup(Rank(), torch.device("cpu")), Trace()
    splits = [Samples(split, task.data(split)) for split in ("train", "validation")]
    trainer: Any = Trainer(task, config, group, *splits, batch_size=8)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), group, trainer.order, resumed_step=0, attempt=1)
        for step in range(WARM_STEP + 1):
            sys.setprofile(trace if step == WARM_STEP else None)
            trainer._step(step)
        sys.setprofile(None)
    return trace


def main() -> None:
    trace = trace_step()
    print("\n".join(trace.files))
    print(f"{len(trace.files)} files, {trace.returns} returns")


if __name__ == "__main__":
    main()
