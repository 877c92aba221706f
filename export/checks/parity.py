"""Compare a graph with torch on the whole test set, by element, prediction and metric, and wherever it may run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from export.checks.cases import to_feed
from export.compare import Arrays, Case, Comparison, Graph, Rows, compare_kinds, distance, finite, rows_with, tied_rows
from export.report import Report
from export.sessions import runtime_setups
from export.tolerance import Scales, allowed_error, is_within, measure_scale
from pipeline.contract.data import Samples, as_task_outputs
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Classifier, Task, is_evaluated
from pipeline.statistics.metrics import calibration_metrics, compute_metrics, lower_is_better
from pipeline.statistics.scores import CANDIDATE, actual_columns, score_batch
from pipeline.system.errors import StageError

MetricLimits = Mapping[str, float]  # evaluate.require
_ROWS = 256  # at once, in a search for missing numbers
_METRIC_SHARE = 1e-3  # of a metric's value: a smaller change is rounding
_NOISE_FACTOR = 10.0  # how far a metric may move beyond what rounding of torch's own outputs does to it
_ROUNDING = 2.0**-19  # sixteen times the rounding of one float32


def compare_test_set(
    graph: Graph, task: Task, samples: Samples, reference: Arrays, config: Export, limits: MetricLimits | None = None
) -> Rows:
    """Compare at every configured batch size; all sizes are reported. `reference`: torch's outputs.

    `limits`: of metrics; None: metrics are not compared.
    """
    metrics, rows = None if limits is None else MetricReference(task, samples, reference, limits), Rows()
    for size in config.batch_sizes:
        started = time.perf_counter()
        outputs = graph_outputs(graph, task, samples, size)
        seconds = time.perf_counter() - started
        comparison = compare_outputs(task, samples, reference, outputs, config, size, seconds)
        if metrics is not None and _is_finite_as(outputs, reference):
            comparison = replace(comparison, changed_metrics=metrics.changes(outputs, comparison.flips))
        rows.append(asdict(comparison))
    return rows


def graph_outputs(graph: Graph, task: Task, samples: Samples, size: int) -> Arrays:
    parts = [graph(to_feed(task, batch)) for batch in samples.batches(range(len(samples)), size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in task.outputs}


def _is_finite_as(outputs: Arrays, reference: Arrays) -> bool:
    """Return False where NaN or infinity took the place of numbers, of which metrics() may make an error."""
    return all(
        bool((np.isfinite(outputs[name]) | ~np.isfinite(array)).all())
        for name, array in reference.items()
        if array.dtype.kind == "f" and outputs[name].shape == array.shape
    )


def compare_outputs(
    task: Task, samples: Samples, reference: Arrays, actual: Arrays, config: Export, size: int, seconds: float
) -> Comparison:
    """Compare two sets of outputs for the whole test set, in the same order.

    NaN equals NaN only for samples with missing numbers; for others no file can equal a model that returns NaN.
    """
    agree, undefined = np.ones(len(samples), dtype=bool), _undefined_samples(task, samples, reference)
    beyond_tolerance, largest, relative, worst_place = 0, 0.0, 0.0, ""
    for name, expected in reference.items():
        if actual[name].shape != expected.shape:
            raise StageError(f"the ONNX file returns `{name}` of shape {actual[name].shape}, torch {expected.shape}")
        close = is_within(actual[name], expected, allowed_error(expected, config))
        error = distance(actual[name], expected)
        if undefined.any():
            same = np.isnan(expected) & np.isnan(actual[name])
            same[~undefined] = False
            close, error = close | same, np.where(same, 0.0, error)
        if expected.dtype.kind in "iu" and expected.ndim == 1:
            tied = tied_rows(reference, len(samples), config, {})
            close, error = close | tied, np.where(tied, 0.0, error)
        beyond_tolerance += int((~close).sum())
        agree &= close.reshape(len(samples), -1).all(axis=1)
        largest_of_output = float(np.nan_to_num(error, nan=np.inf).max())
        if largest_of_output >= largest:
            sample = int(np.nan_to_num(error, nan=np.inf).reshape(len(samples), -1).max(axis=1).argmax())
            largest, worst_place = largest_of_output, f"`{name}` of test sample {sample}"
        relative = max(relative, float(np.nan_to_num(error / np.fmax(np.abs(expected), 1e-12), nan=np.inf).max()))
    flipped = _flips(task, reference, actual, len(samples))
    return Comparison(
        batch_size=size,
        max_abs_error=finite(largest),
        max_rel_error=finite(relative),
        beyond_tolerance=beyond_tolerance,
        flips=int(flipped.sum()),
        # Outputs equal within tolerance whose answer still flips can only be a tie within tolerance.
        unexplained_flips=int((flipped & ~agree).sum()),
        metrics=_metrics(task, samples, actual),
        seconds=seconds,
        worst=worst_place,
    )


def _undefined_samples(task: Task, samples: Samples, reference: Arrays) -> np.ndarray[Any, Any]:
    """Return which samples have missing numbers, if torch returns NaN at all."""
    if not any(np.isnan(array).any() for array in reference.values()):
        return np.zeros(len(samples), dtype=bool)
    batches = samples.batches(range(len(samples)), _ROWS)
    return np.concatenate([rows_with(np.isnan, list(to_feed(task, batch).values())) for batch in batches])


def _flips(task: Task, reference: Arrays, actual: Arrays, count: int) -> np.ndarray[Any, Any]:
    if not isinstance(task, Classifier):
        return np.zeros(count, dtype=bool)
    expected, predicted = (
        task.predicted(as_task_outputs(task, _tensors(arrays))).numpy() for arrays in (reference, actual)
    )
    flipped: np.ndarray[Any, Any] = expected != predicted
    return flipped


def _metrics(task: Task, samples: Samples, outputs: Arrays) -> dict[str, float]:
    """Return the task's metrics on ONNX Runtime's outputs."""
    if not is_evaluated(task):
        return {}
    everything = samples.batch(range(len(samples)))
    values = task.metrics(as_task_outputs(task, _tensors(outputs)), everything)
    return {name: finite(float(value.double().mean())) for name, value in values.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class MetricReference:
    """The metrics of torch's outputs on the test set, and how far rounding moves them."""

    def __init__(self, task: Task, samples: Samples, reference: Arrays, limits: MetricLimits) -> None:
        self._task, self._batch, self._limits = task, samples.batch(range(len(samples))), limits
        self._count, self._actual = len(samples), actual_columns(task, self._batch, len(samples))
        self._expected = self._metrics(reference)
        rounded = self._metrics(_with_rounding(reference))
        self._noise = {name: abs(rounded[name][0] - value) for name, (value, _) in self._expected.items()}

    def changes(self, outputs: Arrays, flips: int) -> tuple[str, ...]:
        """Return a sentence for each metric that is another, or that misses what evaluate.require has.

        A prediction that flips at a tie may change the score of its sample.
        """
        sentences = []
        actual = self._metrics(outputs)
        for name, (expected, better) in self._expected.items():
            value, limit = actual[name][0], self._limits.get(name)
            allowed = _METRIC_SHARE * abs(expected) + _NOISE_FACTOR * self._noise[name] + flips / self._count
            if name in ("ece", "coverage_error"):  # they jump where rounding moves a sample: only their limits count
                allowed = np.inf
            if np.isfinite(expected) and not abs(value - expected) <= allowed:
                sentences.append(f"{name} is {value:.6g} on the test set, in torch {expected:.6g}")
            elif limit is not None and better * (value - limit) < 0 <= better * (expected - limit):
                sentences.append(f"{name} {value:.6g} misses evaluate.require {limit:g}, which torch's {expected:.6g} reaches")  # fmt: skip  # noqa: E501
        return tuple(sentences)

    def _metrics(self, outputs: Arrays) -> dict[str, tuple[float, int]]:
        tensors = as_task_outputs(self._task, _tensors(outputs))
        scores = score_batch(self._task, lambda _: tensors, self._batch)
        columns = {**{CANDIDATE + name: values for name, values in scores.items()}, **self._actual}
        classes = self._task.classes if isinstance(self._task, Classifier) else None
        metrics = compute_metrics(columns, classes, False, lower_is_better(self._task), self._limits)
        every = [*metrics.values(), *calibration_metrics(columns, compared=False)]
        return {metric.name: (metric.value("candidate"), metric.better) for metric in every}


def _with_rounding(reference: Arrays) -> Arrays:
    """Return the outputs with errors of the size of rounding."""
    generator, rounded = np.random.default_rng(0), {}
    for name, array in reference.items():
        if array.dtype.kind == "f":
            finite = np.where(np.isfinite(array), array, 0.0).astype(np.float64)
            size = _ROUNDING * (np.abs(finite) + measure_scale(array).spread)
            array = array + (size * generator.choice((-1.0, 1.0), array.shape)).astype(array.dtype)
        rounded[name] = array
    return rounded


def compare_everywhere(cases: Sequence[Case], path: Path, config: Export, scales: Scales | None = None) -> Report:
    """Return a row for each kind of cases and each setup of this machine."""
    setups, left_out = runtime_setups()
    rows = Rows()
    for setup in setups:
        named = (replace(case, text=f"{case.text} ({setup.text})") for case in cases)
        rows += compare_kinds(setup.open_graph(path), named, partial(setup.tolerance, config), setup.text, scales)
    return Report(coverage=rows, left_out=left_out)
