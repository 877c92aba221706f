"""Judge a variant by numbers alone: how far its outputs are off, what its metric loses, and what it costs.

The numbers are from `samples.py`, or from the kind of the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from export.compare import Array, Arrays
from export.variants.timing import Timing
from pipeline.contract.settings.stages import Cost, Evaluate, Export
from pipeline.contract.task import Classifier, Task
from pipeline.statistics.intervals import Interval
from pipeline.statistics.metrics import Metric, calibration_metrics, compute_metrics, lower_is_better
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, LEVELS, QUERY, Columns
from pipeline.system.errors import StageError

_ALL_WRONG = float(np.finfo(np.float64).max)  # stands for infinity, which JSON does not have


@dataclass(frozen=True)
class Deviation:
    """Deviation from torch's outputs; `share` and `noise` are in standard deviations of the worst output."""

    largest: float
    share: float  # largest
    noise: float  # root mean square

    @classmethod
    def worst(cls, *deviations: Deviation) -> Deviation:
        return cls(
            max(deviation.largest for deviation in deviations),
            max(deviation.share for deviation in deviations),
            max(deviation.noise for deviation in deviations),
        )


@dataclass(frozen=True)
class BatchSizeResult:
    """The results of a variant at one batch size."""

    size: int
    deviation: Deviation
    metrics: Mapping[str, Metric]  # of the file, with torch as the baseline


class OwnMeasure(Protocol):
    """A measure that only a kind of models has, beside the task's metric: the perplexity of a language model."""

    def __str__(self) -> str: ...

    def record(self) -> dict[str, Any]: ...

    def faults(self, budget: Mapping[Cost, float]) -> Iterator[str]:
        """Yield a sentence if it may be beyond its limit."""


@dataclass(frozen=True)
class Answers:
    """What a variant answers, compared with the reference."""

    sizes: Sequence[BatchSizeResult]
    shapes: Sequence[Deviation]  # at shapes that were never traced
    own_measure: OwnMeasure | None = None

    @property
    def deviation(self) -> Deviation:
        return Deviation.worst(*(size.deviation for size in self.sizes), *self.shapes)


class VariantComparison(Protocol):
    """Runs variants, and compares what they answer on the test set with a reference."""

    @property
    def scale(self) -> Mapping[str, float]:
        """The standard deviation of each float output of the reference."""

    def answers(self, path: Path) -> Answers: ...

    def calibration_feeds(self, count: int) -> Sequence[Arrays]:
        """Return inputs of the training split, from which a converter learns ranges or rounding."""

    def timed_feed(self, rows: int) -> Arrays: ...

    def fault_feed(self) -> Arrays:
        """Return the inputs with which a wrong node is searched."""


def compare_scores(task: Task, scores: Columns, reference: Columns, named: Collection[str] = ()) -> dict[str, Metric]:
    """Return the gate's metrics of a file, with the reference's scores as the baseline."""
    columns = {
        **{CANDIDATE + name: values for name, values in scores.items()},
        **{BASELINE + name: reference[name] for name in scores},
        **{name: reference[name] for name in (ACTUAL, QUERY, LEVELS) if name in reference},
    }
    classes = task.classes if isinstance(task, Classifier) else None
    metrics = compute_metrics(columns, classes, True, lower_is_better(task), named)
    return {**metrics, **{metric.name: metric for metric in calibration_metrics(columns, compared=True)}}


def measure_deviation(expected: Arrays, outputs: Arrays, spread: Mapping[str, float]) -> Deviation:
    """Return the worst deviation; equal infinities and NaN count as zero, others that are not finite as infinite."""
    worst = Deviation(0.0, 0.0, 0.0)
    for name, expected_output in expected.items():
        actual = outputs[name]
        if actual.shape != expected_output.shape or actual.dtype != expected_output.dtype:
            expected_text = f"{expected_output.dtype} of shape {list(expected_output.shape)}"
            raise StageError(
                f"it answers `{name}` as {actual.dtype} of shape {list(actual.shape)}, torch as {expected_text}"
            )
        if name not in spread or not expected_output.size:
            continue
        is_same = (expected_output == actual) | (np.isnan(expected_output) & np.isnan(actual))
        with np.errstate(invalid="ignore"):
            distance = np.where(is_same, 0.0, np.abs(expected_output.astype(np.float64) - actual.astype(np.float64)))
        largest, noise = float(distance.max()), float(np.sqrt((distance**2).mean()))
        numbers = (largest, largest / spread[name], noise / spread[name])
        worst = Deviation.worst(
            worst, Deviation(*(min(float(np.nan_to_num(number, nan=np.inf)), _ALL_WRONG) for number in numbers))
        )
    return worst


def output_scale(array: Array) -> float:
    """Return the standard deviation of the finite values; if all are equal, their magnitude."""
    finite = array[np.isfinite(array)].astype(np.float64)
    deviation = float(finite.std()) if finite.size else 0.0
    return deviation or float(np.abs(finite).max(initial=0.0)) or 1.0


_MIN_SAMPLES = 2


@dataclass(frozen=True)
class MetricResult:
    """The metric at the batch size where it may be worst."""

    size: int
    samples: int
    value: float
    reference: float
    difference: Interval | None  # positive is better; None where it cannot be computed
    differing: int  # samples whose score differs from torch's


def evaluate_variant(config: Evaluate, answers: Sequence[BatchSizeResult]) -> MetricResult:
    """Return the paired interval of the gate's metric: the file compared with torch on the same samples.

    The file must pass at every batch size, so the worst decides. That needs no correction for several comparisons.
    """
    return min((_metric_result(config, answers_of_size) for answers_of_size in answers), key=_lower_bound)


def _metric_result(config: Evaluate, answers: BatchSizeResult) -> MetricResult:
    metric = answers.metrics[config.metric]
    difference = metric.difference(config.confidence)
    values = metric.value("candidate"), metric.value("baseline")
    return MetricResult(answers.size, metric.units, *values, difference, metric.differing)


def _lower_bound(result: MetricResult) -> float:
    return -math.inf if result.difference is None else result.difference.low


def variant_margin(export: Export, evaluate: Evaluate) -> float:
    return evaluate.accepted_loss if export.variant_margin == "evaluate.margin" else export.variant_margin


FP16_TOLERANCE = 0.05  # largest error of fp16, in standard deviations of the output
INT8_NOISE = 0.5  # largest root mean square error of int8, in standard deviations of the output


def find_faults(name: str, export: Export, evaluate: Evaluate, result: MetricResult, answers: Answers) -> Iterator[str]:
    """Yield a sentence for each requirement that the variant fails.

    fp32 was verified value by value: its metric is reported, but a margin of 0 must not fail on the last digit.
    """
    yield from _not_finite(answers.sizes)
    if name != "fp32":
        scaled = evaluate.in_units_of(answers.sizes[0].metrics[evaluate.metric].unit_size)
        yield from _metric_faults(evaluate, variant_margin(export, scaled), result)
        if answers.own_measure is not None:
            yield from answers.own_measure.faults(export.budget)
    yield from _limit_faults(evaluate, answers.sizes)
    yield from _deviation_faults(name, Deviation.worst(*(size.deviation for size in answers.sizes)), "the test set")
    if answers.shapes:
        yield from _deviation_faults(name, Deviation.worst(*answers.shapes), "shapes that were never traced")


def budget_faults(budget: Mapping[Cost, float], size_bytes: int, timing: Timing | None) -> Iterator[str]:
    """Yield each exceeded budget; one for the time is kept if the whole interval is within it."""
    for cost, limit in budget.items():
        if cost == "perplexity":
            continue  # judged with the answers
        if cost == "megabytes":
            if size_bytes > limit * 1e6:
                yield f"{size_bytes / 1e6:.3g} MB exceed export.budget megabytes={limit:g}"
            continue
        assert timing is not None, "who sets a budget of time has it measured"
        interval = (timing.p50_ms if cost == "p50_ms" else timing.p99_ms)[1]
        if interval.low > limit:
            low = f"at least {interval.low:.3g}"
            yield f"{cost} is {interval.estimate:.3g} ({low}), over export.budget {cost}={limit:g}"
        elif interval.high > limit:
            high = f"and {interval.high:.3g}" if math.isfinite(interval.high) else "and more than the slowest call"
            yield (
                f"{cost} lies between {interval.low:.3g} {high}, which does not show whether it keeps export.budget "
                f"{cost}={limit:g}; measure again on a machine that does nothing else"
            )


def _not_finite(answers: Sequence[BatchSizeResult]) -> Iterator[str]:
    metrics = [metric for answer in answers for metric in answer.metrics.values() if metric.candidate is not None]
    if names := {metric.name for metric in metrics if not math.isfinite(metric.value("candidate"))}:
        yield f"{', '.join(sorted(names))} is not finite on every test sample"


def _metric_faults(config: Evaluate, margin: float, result: MetricResult) -> Iterator[str]:
    """Apply the gate's rule: the interval's lower bound must be above the margin, or nothing may differ."""
    if not math.isfinite(result.value):
        return  # reported already
    if result.samples < _MIN_SAMPLES:
        yield f"{config.metric} cannot be evaluated on a single test sample"
    elif not result.differing:
        return
    elif result.difference is None:
        yield f"{config.metric} differs in too few of {result.samples} test samples to estimate how large a loss can be"
    elif result.difference.low <= -margin:
        yield (
            f"{config.metric} is {result.value:#.4g} at batch size {result.size}, in torch {result.reference:#.4g}: "
            f"the lower bound {result.difference.low:+#.4g} of the difference misses the margin of {-margin:+.4g}"
        )


def _limit_faults(config: Evaluate, answers: Sequence[BatchSizeResult]) -> Iterator[str]:
    """Yield required metrics that only torch reaches; one that torch misses, too, was overridden by a person."""
    for name, limit in sorted(config.require.items()):
        metrics = [answer.metrics[name] for answer in answers if name in answer.metrics]
        if not metrics or metrics[0].better * (metrics[0].value("baseline") - limit) < 0:
            continue
        worst = min(metric.better * metric.value("candidate") for metric in metrics) * metrics[0].better
        if metrics[0].better * (worst - limit) < 0:
            direction = "above" if metrics[0].lower else "below"
            yield f"{name} {worst:#.4g} is {direction} the required {limit:g}, which torch's answers reach"


def _deviation_faults(name: str, deviation: Deviation, location: str) -> Iterator[str]:
    """Yield deviations that are too large even if the metric is good; the bounds are looser than those of fp32."""
    if name == "fp16" and deviation.share > FP16_TOLERANCE:
        yield (
            f"on {location}, an answer is {deviation.share:.3g} standard deviations off; {FP16_TOLERANCE:g} are allowed"
        )
    if name.startswith("int") and deviation.noise > INT8_NOISE:
        yield (
            f"on {location}, answers are off by {deviation.noise:.3g} standard deviations (root mean square); "
            f"{INT8_NOISE:g} are allowed"
        )
