"""Evaluate a variant: its outputs on the whole test set against torch's, by the task's metrics.

`faults` decides, from numbers alone, whether a variant may be shipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.parity import Arrays, named_arrays, onnx_outputs, open_session, run
from export.to_onnx import MASK, variants
from export.variants.timing import Timing
from pipeline.contract.data import Samples, as_task_outputs, forward
from pipeline.contract.errors import StageError
from pipeline.contract.settings.stages import Cost, Evaluate, Export
from pipeline.contract.statistics.bootstrap import BOOTSTRAP_SEED, Interval, mean_interval
from pipeline.contract.task import HasAxes, Task

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
        except RuntimeError:  # reported already: torch itself fails at this shape
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
    values = task.metrics(as_task_outputs(task, tensors), test.batch(range(len(test))))
    return {name: value.detach().cpu().double().numpy() for name, value in values.items()}


def _seen(array: Array, mask: Array) -> Array:
    """Leave out padded positions of outputs that have one value per position."""
    return array[mask] if array.shape[:2] == mask.shape else array


FEWEST = 2  # samples an interval takes


@dataclass(frozen=True)
class MetricResult:
    """Of all batch sizes, the one where the metric may be worst."""

    size: int
    samples: int
    value: float
    reference: float
    difference: Interval | None  # None where a value is not finite


def evaluate_variant(config: Evaluate, reference: Reference, answers: Sequence[Answers]) -> MetricResult:
    """The paired interval of the task's metric, the file against torch on the same samples.

    The file must pass at every batch size, so that the worst decides; no correction for several looks is due to who
    must pass them all.
    """
    return min((_metric_result(config, reference, one) for one in answers), key=_lowest)


def _metric_result(config: Evaluate, reference: Reference, answers: Answers) -> MetricResult:
    own, torch = answers.metrics[config.metric], reference.metrics[config.metric]
    apart = own - torch
    finite = bool(np.isfinite(apart).all())
    difference = mean_interval(apart, config.confidence, config.resamples, BOOTSTRAP_SEED) if finite else None
    return MetricResult(answers.size, len(own), float(own.mean()), float(torch.mean()), difference)


def _lowest(one: MetricResult) -> float:
    return -math.inf if one.difference is None else one.difference.low


def margin_of(export: Export, evaluate: Evaluate) -> float:
    return evaluate.margin if export.variant_margin == "evaluate.margin" else export.variant_margin


FP16_TOLERANCE = 0.05  # largest error of fp16, in standard deviations of the output
INT8_NOISE = 0.5  # largest root mean square error of int8, in standard deviations of the output


def faults(
    name: str,
    export: Export,
    evaluate: Evaluate,
    found: MetricResult,
    reference: Reference,
    answers: Sequence[Answers],
    shapes: Sequence[Apart],
) -> Iterator[str]:
    """Every rule that is not kept, as a sentence; none where all are.

    fp32 was verified value by value: its metric is reported, but a margin of 0 must not fail on the last digit.
    """
    yield from _not_finite(answers)
    if name != "fp32":
        yield from _inferior(evaluate, margin_of(export, evaluate), found)
    yield from _below_floors(evaluate, reference, answers)
    yield from _apart(name, Apart.worst(*(one.apart for one in answers)), "the test set")
    if shapes:
        yield from _apart(name, Apart.worst(*shapes), "shapes that were never traced")


def over_budget(budget: Mapping[Cost, float], size_bytes: int, timing: Timing | None) -> Iterator[str]:
    """A budget is kept when the whole interval of the time lies within it."""
    for cost, limit in budget.items():
        if cost == "megabytes":
            if size_bytes > limit * 1e6:
                yield f"{size_bytes / 1e6:.3g} MB exceed export.budget megabytes={limit:g}"
            continue
        assert timing is not None, "who sets a budget of time has it measured"
        found = (timing.p50_ms if cost == "p50_ms" else timing.p99_ms)[1]
        if found.low > limit:
            yield f"{cost} is {found.estimate:.3g} (at least {found.low:.3g}), over export.budget {cost}={limit:g}"
        elif found.high > limit:
            high = f"and {found.high:.3g}" if math.isfinite(found.high) else "and more than the slowest call"
            yield (
                f"{cost} lies between {found.low:.3g} {high}, which does not show whether it keeps export.budget "
                f"{cost}={limit:g}; measure again on a machine that does nothing else"
            )


def _not_finite(answers: Sequence[Answers]) -> Iterator[str]:
    found = {name for one in answers for name, values in one.metrics.items() if not np.isfinite(values).all()}
    if found:
        yield f"{', '.join(sorted(found))} is not finite on every test sample"


def _inferior(config: Evaluate, margin: float, found: MetricResult) -> Iterator[str]:
    """As the gate judges a candidate: the interval's lower bound lies above the margin, or nothing differs at all."""
    if found.difference is None:
        return  # reported already
    if found.samples < FEWEST:
        yield f"{config.metric} cannot be evaluated on a single test sample"
    elif found.difference.low <= -margin and found.difference != Interval(0.0, 0.0, 0.0):
        yield (
            f"{config.metric} is {found.value:.4f} at batch size {found.size}, in torch {found.reference:.4f}: the "
            f"lower bound {found.difference.low:+.4f} of the difference misses the margin of {-margin:+.4g}"
        )


def _below_floors(config: Evaluate, reference: Reference, answers: Sequence[Answers]) -> Iterator[str]:
    """Floors that torch's own answers reach; one they miss was forgiven by a person."""
    for name, floor in sorted(config.metric_limits.items()):
        if name not in reference.metrics or float(reference.metrics[name].mean()) < floor:
            continue
        lowest = min(float(one.metrics[name].mean()) for one in answers)
        if lowest < floor:
            yield f"{name} {lowest:.4f} is below the required {floor:g}, which torch's answers reach"


def _apart(name: str, found: Apart, where: str) -> Iterator[str]:
    """Far looser than the tolerances of fp32: it is the metric that judges, this stops what a metric may not see."""
    if name == "fp16" and found.share > FP16_TOLERANCE:
        yield (f"on {where}, an answer is {found.share:.3g} standard deviations off; {FP16_TOLERANCE:g} are allowed")
    if name.startswith("int8") and found.noise > INT8_NOISE:
        yield (
            f"on {where}, answers are off by {found.noise:.3g} standard deviations (root mean square); "
            f"{INT8_NOISE:g} are allowed"
        )
