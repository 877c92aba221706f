"""Compare the ONNX file with torch on the whole test set, element by element and prediction by prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.to_onnx import UntracedBatch, untraced_batches
from export.tolerance import Scales, allowed_error, is_within, measure_scale
from pipeline.contract.data import Samples, as_task_outputs, forward, name_outputs
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Classifier, Task
from pipeline.statistics.metrics import calibration_metrics, compute_metrics, lower_is_better
from pipeline.statistics.scores import CANDIDATE, actual_columns, score_batch
from pipeline.system.errors import StageError

Arrays = dict[str, np.ndarray[Any, Any]]
_ROWS = 256  # at once, in a search for missing numbers


@dataclass(frozen=True)
class Comparison:
    """One pass over the test set at one batch size."""

    batch_size: int
    max_abs_error: float
    max_rel_error: float
    beyond_tolerance: int  # elements
    flips: int  # samples whose predicted class changed
    unexplained_flips: int  # of those, samples whose outputs are not equal within tolerance
    metrics: Mapping[str, float]
    seconds: float
    worst: str  # output and sample of the largest error
    changed_metrics: tuple[str, ...] = ()  # a sentence for each that differs from torch's beyond rounding

    @property
    def equal(self) -> bool:
        return self.beyond_tolerance == 0 and self.unexplained_flips == 0 and not self.changed_metrics


def open_session(path: Path, spinning: bool = True) -> onnxruntime.InferenceSession:
    """Open the file as a service does; threads that do not spin while they wait take less of the processor."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        message = " ".join(str(error).split())
        raise StageError(
            f"{path.name}: the ONNX Runtime {onnxruntime.__version__} that will serve it cannot load it: {message}"
        ) from error


def verify(
    task: Task,
    model: nn.Module,
    samples: Samples,
    path: Path,
    config: Export,
    reference: Arrays | None = None,
    limits: MetricLimits | None = None,
) -> list[dict[str, Any]]:
    """Compare at every configured batch size; all sizes are reported. `reference`: torch's outputs, if known."""
    session = open_session(path)
    if reference is None:
        reference = torch_outputs(task, model, samples, max(config.batch_sizes))
    metrics = MetricReference(task, samples, reference, limits or {})
    comparisons = []
    for size in config.batch_sizes:
        started = time.perf_counter()
        outputs = onnx_outputs(task, session, samples, size)
        seconds = time.perf_counter() - started
        comparison = compare(task, samples, reference, outputs, config, size, seconds)
        changed = metrics.changes(outputs, comparison.flips) if _is_finite_as(outputs, reference) else ()
        comparisons.append(replace(comparison, changed_metrics=changed))
    return [asdict(comparison) for comparison in comparisons]


def _is_finite_as(outputs: Arrays, reference: Arrays) -> bool:
    """Return False where NaN or infinity took the place of numbers, of which metrics() may make an error."""
    return all(
        bool((np.isfinite(outputs[name]) | ~np.isfinite(array)).all())
        for name, array in reference.items()
        if array.dtype.kind == "f" and outputs[name].shape == array.shape
    )


def compare_all(
    task: Task,
    model: nn.Module,
    samples: Samples,
    config: Export,
    parts: Mapping[int, Sequence[Arrays]],
    seconds: float,
) -> list[dict[str, Any]]:
    """Compare outputs for the whole test set, computed elsewhere, with torch's, by batch size."""
    reference = torch_outputs(task, model, samples, max(config.batch_sizes))
    outputs = {
        size: {name: np.concatenate([part[name] for part in size_parts]) for name in task.outputs}
        for size, size_parts in parts.items()
    }
    return [
        asdict(compare(task, samples, reference, outputs_of_size, config, size, seconds))
        for size, outputs_of_size in outputs.items()
    ]


@torch.no_grad()
def evaluated_outputs(task: Task, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Arrays:
    """Return torch's outputs as the evaluation computes them."""
    return named_arrays(task, forward(model, task, batch))


def require_equal(comparisons: Sequence[Mapping[str, Any]], config: Export, why: str = "") -> None:
    """Raise for the first comparison that failed; `why` names the cause where it is known."""
    for row in comparisons:
        if is_different(row):
            changed = row.get("changed_metrics") or ()
            raise StageError(
                f"the ONNX file is not the model: at batch size {row['batch_size']}, {row['beyond_tolerance']} "
                f"elements differ beyond rtol={config.rtol}, atol={config.atol} (worst {row['max_abs_error']:.3g} "
                f"in {row['worst']}) and {row['unexplained_flips']} predictions flip without being ties"
                + "".join(f"; {sentence}" for sentence in (*changed, *([why] if why else [])))
            )


def is_different(row: Mapping[str, Any]) -> bool:
    return bool(row["beyond_tolerance"] or row["unexplained_flips"] or row.get("changed_metrics"))


def compare(
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
        error = _distance(actual[name].astype(np.float64), expected.astype(np.float64))
        if undefined.any():
            same = np.isnan(expected) & np.isnan(actual[name])
            same[~undefined] = False
            close, error = close | same, np.where(same, 0.0, error)
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
        max_abs_error=_finite(largest),
        max_rel_error=_finite(relative),
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
    return np.concatenate([rows_with(np.isnan, [batch[name].numpy() for name in task.inputs]) for batch in batches])


def rows_with(
    condition: Callable[[Any], Any], arrays: Sequence[np.ndarray[Any, Any]]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether the condition holds for a float in one of the arrays."""
    found = np.zeros(len(arrays[0]), dtype=bool)
    for array in arrays:
        if array.dtype.kind == "f":
            found |= condition(array).reshape(len(array), -1).any(axis=1)
    return found


def has_missing(feed: Arrays) -> bool:
    return bool(rows_with(np.isnan, list(feed.values())).any())


def measure(
    pairs: Mapping[str, tuple[np.ndarray[Any, Any], ...]],
    config: Export,
    rows: int,
    seconds: float,
    text: str,
    chosen: str = "",
    *,
    equal_nan: bool = False,
    scales: Scales | None = None,
) -> Comparison:
    """Compare one run that is not a pass over the test set; `chosen`: the output whose argmax is the prediction.

    `equal_nan`: NaN equals NaN, as the inputs have missing numbers. `scales`: of the outputs for the test set.
    """
    beyond_tolerance, flips, unexplained, largest, relative, worst_place = 0, 0, 0, 0.0, 0.0, text
    for name, (expected, actual) in pairs.items():
        if actual.shape != expected.shape:
            raise StageError(
                f"at {text}, the ONNX file returns `{name}` of shape {actual.shape}, torch {expected.shape}"
            )
        close = is_within(actual, expected, allowed_error(expected, config, (scales or {}).get(name)))
        if equal_nan:
            close |= np.isnan(actual) & np.isnan(expected)
        error = np.nan_to_num(_distance(actual.astype(np.float64), expected.astype(np.float64)), nan=np.inf)
        if equal_nan:
            error[np.isnan(actual) & np.isnan(expected)] = 0.0
        beyond_tolerance += int((~close).sum())
        if error.size and error.max() >= largest:
            largest, worst_place = float(error.max()), f"`{name}` at {text}"
        if error.size:
            relative = max(relative, float((error / np.fmax(np.abs(expected), 1e-12)).max()))
        if name == chosen:
            flipped = actual.argmax(axis=-1) != expected.argmax(axis=-1)
            flips, unexplained = int(flipped.sum()), int((flipped & ~close.all(axis=-1)).sum())
    return Comparison(
        rows, _finite(largest), _finite(relative), beyond_tolerance, flips, unexplained, {}, seconds, worst_place
    )


def combine(parts: Sequence[Comparison]) -> Comparison:
    """Combine several comparisons into one."""
    worst = max(parts, key=lambda part: part.max_abs_error)
    return replace(
        worst,
        batch_size=max(part.batch_size for part in parts),
        max_rel_error=max(part.max_rel_error for part in parts),
        beyond_tolerance=sum(part.beyond_tolerance for part in parts),
        flips=sum(part.flips for part in parts),
        unexplained_flips=sum(part.unexplained_flips for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


@torch.no_grad()
def torch_outputs(task: Task, model: nn.Module, samples: Samples, size: int) -> Arrays:
    parts = [named_arrays(task, forward(model, task, batch)) for batch in samples.batches(range(len(samples)), size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in task.outputs}


def onnx_outputs(task: Task, session: onnxruntime.InferenceSession, samples: Samples, size: int) -> Arrays:
    parts = [
        run(session, {name: batch[name].numpy() for name in task.inputs})
        for batch in samples.batches(range(len(samples)), size)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in task.outputs}


def run(session: onnxruntime.InferenceSession, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    try:
        outputs = session.run(names, dict(inputs))
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise StageError(f"ONNX Runtime cannot run the file on {shapes}: {' '.join(str(error).split())}") from error
    return dict(zip(names, outputs, strict=True))


@torch.no_grad()
def verify_untraced(
    task: Task, model: nn.Module, samples: Samples, path: Path, config: Export, scales: Scales | None = None
) -> list[dict[str, Any]]:
    """Compare at lengths, batch sizes and paddings that were not traced."""
    session, comparisons = open_session(path), []
    for untraced in untraced_batches(task, samples):
        try:
            expected = named_arrays(task, forward(model, task, untraced.batch))
        except RuntimeError as error:  # a window that is longer than the text
            print(f"not compared at {untraced.text}: torch itself fails ({' '.join(str(error).split())[:160]})")
            continue
        comparisons.append(asdict(_compare_untraced(task, session, untraced, expected, config, scales)))
    if len({comparison["worst"].rpartition(" at ")[2] for comparison in comparisons}) < 2:
        raise StageError(
            "fewer than two shapes other than the traced one could be compared; add longer samples to the test data"
        )
    return comparisons


def _compare_untraced(
    task: Task,
    session: onnxruntime.InferenceSession,
    untraced: UntracedBatch,
    expected: Arrays,
    config: Export,
    scales: Scales | None,
) -> Comparison:
    started = time.perf_counter()
    feed = {name: untraced.batch[name].numpy() for name in task.inputs}
    actual = run(session, feed)
    seconds = time.perf_counter() - started
    pairs = {
        name: tuple(unpadded(arrays[name], untraced.token_mask) for arrays in (expected, actual)) for name in expected
    }
    return measure(pairs, config, untraced.rows, seconds, untraced.text, equal_nan=has_missing(feed), scales=scales)


def unpadded(array: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    """Leave out padded positions of outputs that have one value per position."""
    return array[mask] if mask is not None and array.shape[:2] == mask.shape else array


def named_arrays(task: Task, outputs: Any) -> Arrays:
    """Return outputs as numpy arrays; numpy has no bfloat16, so that becomes float32."""
    tensors = name_outputs(task, outputs).items()
    return {name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors}


def _distance(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the absolute error; equal infinities, as in masked scores, count as zero."""
    with np.errstate(invalid="ignore"):
        distance: np.ndarray[Any, Any] = np.where(actual == expected, 0.0, np.abs(actual - expected))
    return distance


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
    everything = samples.batch(range(len(samples)))
    values = task.metrics(as_task_outputs(task, _tensors(outputs)), everything)
    return {name: _finite(float(value.double().mean())) for name, value in values.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _finite(value: float) -> float:
    """Replace infinity, which JSON cannot hold, by the largest double."""
    return float(np.nan_to_num(value, nan=np.finfo(np.float64).max))


MetricLimits = Mapping[str, float]  # evaluate.require
_METRIC_SHARE = 1e-3  # of a metric's value: a smaller change is rounding
_NOISE_FACTOR = 10.0  # how far a metric may move beyond what rounding of torch's own outputs does to it


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
            if name == "ece":  # it jumps where rounding moves a sample into another bin: only its limit counts
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
        metrics = compute_metrics(columns, classes, compared=False, lower=lower_is_better(self._task))
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


_ROUNDING = 2.0**-19  # sixteen times the rounding of one float32
