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

from pipeline.contract.config import parse_config
from pipeline.contract.data import Samples
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.ledger import Ledger
from train.process_group import ProcessGroup
from train.state import Progress
from train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
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


class StepTrace:
    """Takes the place of the profiler that the training loop calls before each step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def before(self, step: int) -> None:
        sys.setprofile(self._record if step == WARM_STEP else None)

    def end(self, _step: int) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(path.is_relative_to(folder) for folder in OURS):
            self.calls.append((str(path.relative_to(ROOT)), frame.f_code.co_qualname))

    @property
    def visits(self) -> list[str]:
        """The files in the order they are entered; calls within one file are one visit."""
        files = [file for file, _ in self.calls]
        return [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of the first visit."""
        return list(dict.fromkeys(self.visits))


def trace_step() -> StepTrace:
    settings = {"epochs": 1, "batch_size": 8, "device": "cpu", "log_every": 1000}
    config = parse_config({"name": "x", "task": "t.py:T", "codec": "c.py:C", "train": settings}, source="trace")
    task: Any = LineTask()
    group = ProcessGroup(Rank(), torch.device("cpu"))
    train, validation = (Samples(split, task.data(split)) for split in ("train", "validation"))
    trainer = Trainer(task, config, group, train, validation, 8)
    trace: Any = StepTrace()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder), group, trainer.order, resumed_step=0, attempt=1)
        trainer.fit(Progress(), CheckpointStore(Path(folder), 1, {}, group), None, trace, ledger)
    traced: StepTrace = trace
    return traced


def main() -> None:
    trace = trace_step()
    if "--calls" in sys.argv[1:]:
        previous = ""
        for file, function in trace.calls:
            print(f"{file if file != previous else '':34} {function}")
            previous = file
        print()
    print("\n".join(trace.files))
    print(f"{len(trace.files)} files, {len(trace.visits) - len(trace.files)} returns")


if __name__ == "__main__":
    main()
