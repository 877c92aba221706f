"""`python -m benchmarks.trace_step`: print the source files that one warm training step passes through.

A reader who follows a step jumps from file to file. A small model trains in this process, and during one warm step of
the training loop every function of ours that is entered is recorded. Two numbers come out: how many files the step
passes, and how often it enters a file again that it had left before. With `--calls` the functions are printed too.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.call_trace import ROOT, CallTrace
from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.ledger import Ledger
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

OURS = (ROOT / "train", ROOT / "pipeline")
WARM_STEP = 3


class LineTask:
    """Fits a line."""

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


class StepProfiler:
    """Replaces the profiler that the training loop calls before each step, and traces one warm step."""

    def __init__(self) -> None:
        self.trace = CallTrace(OURS)

    def before(self, step: int) -> None:
        sys.setprofile(self._record if step == WARM_STEP else None)

    def end(self, _step: int) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.trace.record(frame)


def trace_step() -> CallTrace:
    settings = {"epochs": 1, "batch_size": 8, "device": "cpu", "log_every": 1000}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": settings}, source="trace")
    task: Any = LineTask()
    group = ProcessGroup(Rank(), torch.device("cpu"))
    train, validation = (Samples(split, task.data(split)) for split in ("train", "validation"))
    trainer = Trainer(task, config, group, train, validation, 8)
    profiler = StepProfiler()
    tracer: Any = profiler  # with the methods of a StepTracer
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), group, trainer.order, resumed_step=0, attempt=1)
        trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None, tracer, ledger)
    return profiler.trace


def main() -> None:
    trace = trace_step()
    if "--calls" in sys.argv[1:]:
        trace.print_calls()
    print("\n".join(trace.files))
    print(f"{len(trace.files)} files, {trace.returns} returns")


if __name__ == "__main__":
    main()
