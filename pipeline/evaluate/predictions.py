"""Per-sample results of one predictor on one batch, checked as they come.

The columns of `predictions.npz`, one value (or row) per sample under each name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.contract.data import forward
from pipeline.contract.errors import DataError
from pipeline.contract.task import Classifier, HasProbabilities, Regressor, Task

if TYPE_CHECKING:
    from pipeline.contract.task import Batch, Outputs, Predictor


_SUM_SLACK = 1e-3


def candidate_predictor(model: nn.Module, task: Task, device: torch.device) -> Predictor:
    """The model on its device; its answers come back to the CPU, where every predictor is measured alike."""

    def predict(batch: Batch) -> Outputs:
        outputs = forward(model, task, {name: batch[name].to(device) for name in task.inputs})
        if isinstance(outputs, Tensor):
            return outputs.cpu()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    return predict


@torch.inference_mode()
def measure(task: Task, predict: Predictor, batch: Batch) -> Columns:
    """Every metric of the task for each sample and, for a classifier, the predicted class."""
    count, outputs = count_of(batch), predict(batch)
    values = task.metrics(outputs, batch)
    if not isinstance(values, Mapping) or not values:
        raise DataError("metrics(): must return a mapping of metric names to one value per sample")
    found = {name: _per_sample(name, value, count) for name, value in values.items()}
    if taken := sorted({PREDICTED, PROBABILITIES} & found.keys()):
        raise DataError(f"metrics(): a metric cannot be called {taken[0]!r}; give it another name")
    return found | _said(task, outputs, count)


def _said(task: Task, outputs: Outputs, count: int) -> Columns:
    """Beside the metrics: what was answered, by the kind of the task."""
    if isinstance(task, Classifier):
        found = {PREDICTED: classes_of(task, "predicted", task.predicted(outputs), count)}
        if isinstance(task, HasProbabilities):
            found[PROBABILITIES] = _probabilities(task.probabilities(outputs), count, len(task.classes))
        return found
    if isinstance(task, HasProbabilities):
        raise DataError("probabilities(): needs `classes`, predicted() and actual() beside it")
    if isinstance(task, Regressor):
        return {PREDICTED: numbers_of("predicted", task.predicted(outputs), count)}
    return {}


def numbers_of(method: str, value: object, count: int) -> Array:
    """What predicted() or actual() of a task without classes returned."""
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"{method}(): must be one number per sample, shape ({count},), found {found}")
    return value.detach().cpu().to(torch.float64).numpy()


def _probabilities(value: object, count: int, classes: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count, classes):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"probabilities(): must have shape ({count}, {classes}), a row per sample, found {found}")
    rows = value.detach().cpu().to(torch.float32).numpy()
    right = np.isfinite(rows).all() and (rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) <= _SUM_SLACK).all()
    if not right:
        raise DataError("probabilities(): a row is not between 0 and 1 with a sum of 1; is a softmax missing?")
    return rows


def classes_of(task: Classifier, method: str, value: Tensor, count: int) -> Array:
    """What predicted() or actual() returned, as class indices of these samples."""
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,) or value.is_floating_point():
        found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"{method}(): must be one whole number per sample, shape ({count},), found {found}")
    classes = value.detach().cpu().to(torch.int64).numpy()
    if ((classes < 0) | (classes >= len(task.classes))).any():
        raise DataError(f"{method}(): a class index lies outside the {len(task.classes)} classes of the task")
    return classes


def count_of(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def join(parts: list[Columns]) -> Columns:
    """Consecutive parts as one; a column is there in every part or in none. Parts without samples are left out."""
    filled = [part for part in parts if part]
    names = list(filled[0]) if filled else []
    for part in filled:
        if differing := sorted(set(names) ^ set(part)):
            raise DataError(f"metrics(): {', '.join(differing)} is returned for some batches and not for others")
    return {name: np.concatenate([part[name] for part in filled]) for name in names}


def _per_sample(name: str, value: object, count: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,):
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"metrics(): {name} must be a tensor of one value per sample, shape ({count},), found {found}")
    return value.detach().cpu().to(torch.float64).numpy()


Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = dict[str, Array]

CANDIDATE, BASELINE = "candidate.", "baseline."  # before the names of what each said
PREDICTED = "predicted"  # the class index, number or score, beside one column for each metric
PROBABILITIES = "probabilities"  # a row per sample
ACTUAL, QUERY, SLICE = "actual", "query", "slice."  # what is known of the samples themselves
