"""A task and its splits without a project: what the checks see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.contract.run import Run, RunFile
from pipeline.data_checks.rules import Finding
from pipeline.data_checks.run_checks import Look, look

Made: TypeAlias = Mapping[str, Any]
LookAt: TypeAlias = Callable[..., Look]


class Plain:
    """No classes: what it learns stands in the columns that are no inputs."""

    outputs: Sequence[str] = ("y",)

    def __init__(self, inputs: Sequence[str]) -> None:
        self.inputs = inputs

    def model(self) -> Any: ...
    def data(self, split: str) -> Any: ...
    def loss(self, outputs: Any, batch: Any) -> Any: ...
    def metrics(self, outputs: Any, batch: Any) -> Any: ...


class Classes(Plain):
    def __init__(self, inputs: Sequence[str], classes: Sequence[str]) -> None:
        super().__init__(inputs)
        self.classes = classes

    def predicted(self, outputs: Any) -> Any: ...

    def actual(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["label"]


class Items:
    """The same columns, a sample at a time."""

    def __init__(self, columns: Made) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.as_tensor(column[index]) for name, column in self.columns.items()}


@pytest.fixture
def look_at(tmp_path: Path) -> LookAt:
    """What is found in train, validation and test; the last one is the validation too where there is none."""

    def found(train: Made, test: Made, validation: Made | None = None, **words: Any) -> Look:
        classes, items = words.pop("classes", None), words.pop("items", False)
        inputs = words.pop("inputs", [name for name in train if name != "label"])
        task = Classes(inputs, classes) if classes else Plain(inputs)
        run = new_run(tmp_path, **words)
        sides = {"train": train, "validation": test if validation is None else validation, "test": test}
        wrapped: Any = {name: Items(side) if items else side for name, side in sides.items()}
        return look(run, task, {name: Samples(name, side) for name, side in wrapped.items()})

    return found


def new_run(folder: Path, name: str = "run", **words: Any) -> Run:
    run = Run(folder / "runs" / name)
    run.partial("prepare").mkdir(parents=True, exist_ok=True)
    config = {"name": "x", "task": "task.py:T", "codec": "codec.py:C", "prepare": words}
    body = RunFile(id=name, created="2026-01-01", wanted=("prepare",), config=config, environment={})
    (run.path / "run.json").write_text(body.model_dump_json())
    return run


def told(found: Look, check: str) -> list[Finding]:
    """The alarms of one check."""
    return [one for one in found.findings if one.check == check and one.level != "ok"]


def alarms(found: Look) -> list[str]:
    return [one.sentence() for one in found.findings if one.level != "ok"]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
