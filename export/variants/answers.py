"""What a variant's file answers to the whole test set, held against torch and judged by the task's own metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.axes import MASK, variants
from export.parity import Arrays, named_arrays, onnx_outputs, open_session, run
from pipeline.spec.data import Samples, bare, forward
from pipeline.spec.errors import StageError
from pipeline.spec.task import HasAxes, Task

Array = np.ndarray[Any, Any]
_ALL_WRONG = float(np.finfo(np.float64).max)  # stands for infinity, which JSON does not have


@dataclass(frozen=True)
class Apart:
    """How far answers are from torch's; the last two in standard deviations of the output, of its worst output."""

    largest: float
    share: float  # largest
    noise: float  # root mean square

    @classmethod
    def worst(cls, *found: Apart) -> Apart:
        return cls(max(one.largest for one in found), max(one.share for one in found), max(one.noise for one in found))


@dataclass(frozen=True)
class Reference:
    """What torch answers, and what that is worth."""

    outputs: Arrays
    spread: Mapping[str, float]  # of each output of floats
    metrics: Mapping[str, Array]  # a value for each sample


@dataclass(frozen=True)
class Answers:
    """Of a variant, at one batch size."""

    size: int
    apart: Apart
    metrics: Mapping[str, Array]


@torch.no_grad()
def reference_of(task: Task, model: nn.Module, test: Samples, size: int) -> Reference:
    batches = test.batches(range(len(test)), size)
    parts = [named_arrays(task, forward(model, task, batch)) for batch in batches]
    outputs = {name: np.concatenate([part[name] for part in parts]) for name in task.outputs}
    spread = {name: spread_of(array) for name, array in outputs.items() if array.dtype.kind == "f"}
    return Reference(outputs, spread, metrics_of(task, test, outputs))


def answers_of(task: Task, test: Samples, path: Path, reference: Reference, size: int) -> Answers:
    found = onnx_outputs(task, open_session(path), test, size)
    return Answers(size, apart(reference.outputs, found, reference.spread), metrics_of(task, test, found))


def rounding(task: Task, test: Samples, path: Path, size: int) -> float:
    """How far two ways of computing one quantised file are apart at most: by kernels of integers, and in floats.

    A rounding that falls the other way moves an answer by a step. Twice of what is seen is what to expect elsewhere.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    plain = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    one, other = (onnx_outputs(task, session, test, size) for session in (open_session(path), plain))
    return 2 * apart(one, other, {name: 1.0 for name, array in one.items() if array.dtype.kind == "f"}).largest


@torch.no_grad()
def stretched(task: Task, model: nn.Module, test: Samples, path: Path, reference: Reference) -> list[Apart]:
    """The same at lengths and paddings that were never traced, where the task has such axes."""
    if not isinstance(task, HasAxes):
        return []
    session, found = open_session(path), []
    for one in variants(task, test):
        try:
            expected = named_arrays(task, forward(model, task, one.batch))
        except RuntimeError:  # parity has said so: torch itself refuses this shape
            continue
        got = run(session, {name: one.batch[name].numpy() for name in task.inputs})
        mask = one.batch[MASK].numpy() == 1 if MASK in one.batch else np.ones((0, 0), dtype=bool)
        seen = [{name: _seen(array, mask) for name, array in arrays.items()} for arrays in (expected, got)]
        found.append(apart(seen[0], seen[1], reference.spread))
    return found


def apart(expected: Arrays, found: Arrays, spread: Mapping[str, float]) -> Apart:
    """An infinity that is equal is no distance; anything else that is not finite is all wrong."""
    worst = Apart(0.0, 0.0, 0.0)
    for name, wanted in expected.items():
        got = found[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise StageError(
                f"it answers `{name}` as {got.dtype} of shape {list(got.shape)}, torch as {wanted.dtype} of shape "
                f"{list(wanted.shape)}"
            )
        if name not in spread or not wanted.size:
            continue
        with np.errstate(invalid="ignore"):
            distance = np.where(wanted == got, 0.0, np.abs(wanted.astype(np.float64) - got.astype(np.float64)))
        largest, noise = float(distance.max()), float(np.sqrt((distance**2).mean()))
        numbers = (largest, largest / spread[name], noise / spread[name])
        worst = Apart.worst(worst, Apart(*(min(float(np.nan_to_num(one, nan=np.inf)), _ALL_WRONG) for one in numbers)))
    return worst


def spread_of(array: Array) -> float:
    """The standard deviation of what is finite; of answers that are all equal, their size."""
    finite = array[np.isfinite(array)].astype(np.float64)
    deviation = float(finite.std()) if finite.size else 0.0
    return deviation or float(np.abs(finite).max(initial=0.0)) or 1.0


@torch.no_grad()
def metrics_of(task: Task, test: Samples, outputs: Arrays) -> dict[str, Array]:
    tensors = {name: torch.from_numpy(array) for name, array in outputs.items()}
    values = task.metrics(bare(task, tensors), test.batch(range(len(test))))
    return {name: value.detach().cpu().double().numpy() for name, value in values.items()}


def _seen(array: Array, mask: Array) -> Array:
    """An answer for each position says nothing where there is padding."""
    return array[mask] if array.shape[:2] == mask.shape else array
