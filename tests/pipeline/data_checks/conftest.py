"""A task and its splits without a project, as the checks get them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.contract.run import Run
from pipeline.data_checks.rules import CheckResult
from pipeline.data_checks.run_checks import CheckedData, check_data

from ..records import write_run_file

Columns: TypeAlias = Mapping[str, Any]
Check: TypeAlias = Callable[..., CheckedData]


class Plain:
    """A task without classes: its labels are the columns that are not inputs."""

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


class Ranks(Plain):
    def predicted(self, outputs: Any) -> Any: ...
    def queries(self, batch: Any) -> Any: ...

    def actual(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["relevance"]


class Forecasts(Plain):
    def predicted(self, outputs: Any) -> Any: ...

    def actual(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["future"]


class Items:
    """The same columns as a dataset of single samples."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: torch.as_tensor(column[index]) for name, column in self.columns.items()}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that checks train, validation and test; without validation, test is used for both."""

    def run_checks(train: Columns, test: Columns, validation: Columns | None = None, **settings: Any) -> CheckedData:
        classes, items = settings.pop("classes", None), settings.pop("items", False)
        inputs = settings.pop("inputs", [name for name in train if name != "label"])
        kind = settings.pop("kind", Ranks if settings.pop("ranks", False) else Plain)
        task = Classes(inputs, classes) if classes else kind(inputs)
        run = new_run(tmp_path, **settings)
        sides = {"train": train, "validation": test if validation is None else validation, "test": test}
        wrapped: Any = {name: Items(side) if items else side for name, side in sides.items()}
        return check_data(run, task, {name: Samples(name, side) for name, side in wrapped.items()})

    return run_checks


def new_run(folder: Path, name: str = "run", **settings: Any) -> Run:
    run = Run(folder / "runs" / name)
    run.partial("prepare").mkdir(parents=True, exist_ok=True)
    return write_run_file(run, "prepare", prepare=settings)


def alarms_of(data: CheckedData, check: str) -> list[CheckResult]:
    """Return the results of one check that are not ok."""
    return [result for result in data.results if result.check == check and result.level != "ok"]


def alarms(data: CheckedData) -> list[str]:
    """Return what is not ok, except that the test samples are also the validation's."""
    return [result.sentence() for result in data.results if result.level != "ok" and result.check != "copies"]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
