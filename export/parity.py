"""Compare the ONNX file with torch on the whole test set, element by element and prediction by prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.to_onnx import MASK, Variant, variants
from pipeline.contract.data import Samples, as_task_outputs, forward, name_outputs
from pipeline.contract.errors import StageError
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Classifier, Task

Arrays = dict[str, np.ndarray[Any, Any]]


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

    @property
    def equal(self) -> bool:
        return self.beyond_tolerance == 0 and self.unexplained_flips == 0


def open_session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        message = " ".join(str(error).split())
        raise StageError(
            f"{path.name}: the ONNX Runtime {onnxruntime.__version__} that will serve it cannot load it: {message}"
        ) from error


def verify(task: Task, model: nn.Module, samples: Samples, path: Path, config: Export) -> list[dict[str, Any]]:
    """Compare at every configured batch size; raises at the end, so that all sizes are reported."""
    session = open_session(path)
    reference = torch_outputs(task, model, samples, max(config.batch_sizes))
    comparisons = []
    for size in config.batch_sizes:
        started = time.perf_counter()
        found = onnx_outputs(task, session, samples, size)
        seconds = time.perf_counter() - started
        comparisons.append(compare(task, samples, reference, found, config, size, seconds))
    return [asdict(comparison) for comparison in comparisons]


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
    found = {
        size: {name: np.concatenate([one[name] for one in each]) for name in task.outputs}
        for size, each in parts.items()
    }
    return [asdict(compare(task, samples, reference, each, config, size, seconds)) for size, each in found.items()]


@torch.no_grad()
def evaluated_outputs(task: Task, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Arrays:
    """Return torch's outputs as the evaluation computes them."""
    return named_arrays(task, forward(model, task, batch))


def require_equal(comparisons: Sequence[Mapping[str, Any]], config: Export, why: str = "") -> None:
    """Raise for the first comparison that failed; `why` names the cause where it is known."""
    for found in comparisons:
        if found["beyond_tolerance"] or found["unexplained_flips"]:
            raise StageError(
                f"the ONNX file is not the model: at batch size {found['batch_size']}, {found['beyond_tolerance']} "
                f"elements differ beyond rtol={config.rtol}, atol={config.atol} (worst {found['max_abs_error']:.3g} "
                f"in {found['worst']}) and {found['unexplained_flips']} predictions flip without being ties"
                + (f"; {why}" if why else "")
            )


def compare(
    task: Task, samples: Samples, reference: Arrays, found: Arrays, config: Export, size: int, seconds: float
) -> Comparison:
    """Compare two sets of outputs for the whole test set, in the same order."""
    agree = np.ones(len(samples), dtype=bool)
    beyond, largest, relative, worst = 0, 0.0, 0.0, ""
    for name, expected in reference.items():
        if found[name].shape != expected.shape:
            raise StageError(f"the ONNX file returns `{name}` of shape {found[name].shape}, torch {expected.shape}")
        close = np.isclose(found[name], expected, rtol=config.rtol, atol=config.atol)
        error = _distance(found[name].astype(np.float64), expected.astype(np.float64))
        beyond += int((~close).sum())
        agree &= close.reshape(len(samples), -1).all(axis=1)
        top = float(np.nan_to_num(error, nan=np.inf).max())
        if top >= largest:
            sample = int(np.nan_to_num(error, nan=np.inf).reshape(len(samples), -1).max(axis=1).argmax())
            largest, worst = top, f"`{name}` of test sample {sample}"
        relative = max(relative, float(np.nan_to_num(error / np.maximum(np.abs(expected), 1e-12), nan=np.inf).max()))
    flipped = _flips(task, reference, found, len(samples))
    return Comparison(
        batch_size=size,
        max_abs_error=_finite(largest),
        max_rel_error=_finite(relative),
        beyond_tolerance=beyond,
        flips=int(flipped.sum()),
        # Outputs equal within tolerance whose answer still flips can only be a tie within tolerance.
        unexplained_flips=int((flipped & ~agree).sum()),
        metrics=_metrics(task, samples, found),
        seconds=seconds,
        worst=worst,
    )


def measure(
    pairs: Mapping[str, tuple[np.ndarray[Any, Any], ...]],
    config: Export,
    rows: int,
    seconds: float,
    text: str,
    chosen: str = "",
) -> Comparison:
    """Compare one run that is not a pass over the test set; `chosen`: the output whose argmax is the prediction."""
    beyond, flips, unexplained, largest, relative, worst = 0, 0, 0, 0.0, 0.0, text
    for name, (expected, found) in pairs.items():
        if found.shape != expected.shape:
            raise StageError(
                f"at {text}, the ONNX file returns `{name}` of shape {found.shape}, torch {expected.shape}"
            )
        close = np.isclose(found, expected, rtol=config.rtol, atol=config.atol)
        error = np.nan_to_num(_distance(found.astype(np.float64), expected.astype(np.float64)), nan=np.inf)
        beyond += int((~close).sum())
        if error.size and error.max() >= largest:
            largest, worst = float(error.max()), f"`{name}` at {text}"
        if error.size:
            relative = max(relative, float((error / np.maximum(np.abs(expected), 1e-12)).max()))
        if name == chosen:
            flipped = found.argmax(axis=-1) != expected.argmax(axis=-1)
            flips, unexplained = int(flipped.sum()), int((flipped & ~close.all(axis=-1)).sum())
    return Comparison(rows, _finite(largest), _finite(relative), beyond, flips, unexplained, {}, seconds, worst)


def combine(parts: Sequence[Comparison]) -> Comparison:
    """Combine several comparisons into one."""
    worst = max(parts, key=lambda one: one.max_abs_error)
    return replace(
        worst,
        batch_size=max(one.batch_size for one in parts),
        max_rel_error=max(one.max_rel_error for one in parts),
        beyond_tolerance=sum(one.beyond_tolerance for one in parts),
        flips=sum(one.flips for one in parts),
        unexplained_flips=sum(one.unexplained_flips for one in parts),
        seconds=sum(one.seconds for one in parts),
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
        found = session.run(names, dict(inputs))
    except Exception as error:  # ONNX Runtime raises a dozen types without a common base
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise StageError(f"ONNX Runtime cannot run the file on {shapes}: {' '.join(str(error).split())}") from error
    return dict(zip(names, found, strict=True))


@torch.no_grad()
def verify_variants(task: Task, model: nn.Module, samples: Samples, path: Path, config: Export) -> list[dict[str, Any]]:
    """Compare at lengths, batch sizes and paddings that were not traced."""
    session, found = open_session(path), []
    for one in variants(task, samples):
        try:
            expected = named_arrays(task, forward(model, task, one.batch))
        except RuntimeError as error:  # a window that is longer than the text
            print(f"not compared at {one.text}: torch itself fails ({' '.join(str(error).split())[:160]})")
            continue
        found.append(asdict(_variant(task, session, one, expected, config)))
    if len({one["worst"].rpartition(" at ")[2] for one in found}) < 2:
        raise StageError(
            "fewer than two shapes other than the traced one could be compared; add longer samples to the test data"
        )
    return found


def _variant(
    task: Task, session: onnxruntime.InferenceSession, one: Variant, expected: Arrays, config: Export
) -> Comparison:
    started = time.perf_counter()
    found = run(session, {name: one.batch[name].numpy() for name in task.inputs})
    seconds = time.perf_counter() - started
    mask = one.batch[MASK].numpy() == 1 if MASK in one.batch else np.ones((0, 0), dtype=bool)
    pairs = {name: tuple(_seen(arrays[name], mask) for arrays in (expected, found)) for name in expected}
    return measure(pairs, config, one.rows, seconds, one.text)


def _seen(array: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Leave out padded positions of outputs that have one value per position."""
    return array[mask] if array.shape[:2] == mask.shape else array


def named_arrays(task: Task, outputs: Any) -> Arrays:
    """Return outputs as numpy arrays; numpy has no bfloat16, so that becomes float32."""
    tensors = name_outputs(task, outputs).items()
    return {name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors}


def _distance(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the absolute error; equal infinities, as in masked scores, count as zero."""
    with np.errstate(invalid="ignore"):
        distance: np.ndarray[Any, Any] = np.where(found == expected, 0.0, np.abs(found - expected))
    return distance


def _flips(task: Task, reference: Arrays, found: Arrays, count: int) -> np.ndarray[Any, Any]:
    if not isinstance(task, Classifier):
        return np.zeros(count, dtype=bool)
    before, after = (task.predicted(as_task_outputs(task, _tensors(arrays))).numpy() for arrays in (reference, found))
    flipped: np.ndarray[Any, Any] = before != after
    return flipped


def _metrics(task: Task, samples: Samples, found: Arrays) -> dict[str, float]:
    """Return the task's metrics on ONNX Runtime's outputs."""
    everything = samples.batch(range(len(samples)))
    values = task.metrics(as_task_outputs(task, _tensors(found)), everything)
    return {name: _finite(float(value.double().mean())) for name, value in values.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _finite(value: float) -> float:
    """Replace infinity, which JSON cannot hold, by the largest double."""
    return float(np.nan_to_num(value, nan=np.finfo(np.float64).max))
