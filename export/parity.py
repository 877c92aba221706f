"""Is the ONNX file the model? The whole test set through ONNX Runtime, element by element and answer by answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from pipeline.spec.data import Samples, bare, forward, named
from pipeline.spec.errors import StageError
from pipeline.spec.sections import Export
from pipeline.spec.task import Classifier, Task

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
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


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


def require_equal(comparisons: Sequence[Mapping[str, Any]], config: Export) -> None:
    for found in comparisons:
        if found["beyond_tolerance"] or found["unexplained_flips"]:
            raise StageError(
                f"the ONNX file is not the model: at batch size {found['batch_size']}, {found['beyond_tolerance']} "
                f"elements differ beyond rtol={config.rtol}, atol={config.atol} (worst {found['max_abs_error']:.3g} "
                f"in {found['worst']}) and {found['unexplained_flips']} predictions flip without being ties"
            )


def compare(
    task: Task, samples: Samples, reference: Arrays, found: Arrays, config: Export, size: int, seconds: float
) -> Comparison:
    """Both sides hold every sample of the test set, in order."""
    agree = np.ones(len(samples), dtype=bool)
    beyond, largest, relative, worst = 0, 0.0, 0.0, ""
    for name, expected in reference.items():
        if found[name].shape != expected.shape:
            raise StageError(f"the ONNX file answers `{name}` of shape {found[name].shape}, torch {expected.shape}")
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
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def named_arrays(task: Task, outputs: Any) -> Arrays:
    """numpy has no bfloat16; everything else keeps its type."""
    tensors = named(task, outputs).items()
    return {name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy() for name, tensor in tensors}


def _distance(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equal infinities, as masked scores have them, are no distance apart."""
    with np.errstate(invalid="ignore"):
        distance: np.ndarray[Any, Any] = np.where(found == expected, 0.0, np.abs(found - expected))
    return distance


def _flips(task: Task, reference: Arrays, found: Arrays, count: int) -> np.ndarray[Any, Any]:
    if not isinstance(task, Classifier):
        return np.zeros(count, dtype=bool)
    before, after = (task.predicted(bare(task, _tensors(arrays))).numpy() for arrays in (reference, found))
    flipped: np.ndarray[Any, Any] = before != after
    return flipped


def _metrics(task: Task, samples: Samples, found: Arrays) -> dict[str, float]:
    """The task's own metrics on what ONNX Runtime answered."""
    everything = samples.batch(range(len(samples)))
    values = task.metrics(bare(task, _tensors(found)), everything)
    return {name: _finite(float(value.double().mean())) for name, value in values.items()}


def _tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _finite(value: float) -> float:
    """JSON has no infinity; the largest double stands for it."""
    return float(np.nan_to_num(value, nan=np.finfo(np.float64).max))
