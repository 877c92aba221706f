"""Per-sample scores and outputs of one predictor on one batch: the columns of `predictions.npz`.

Everything that the task's methods return is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.contract.data import forward
from pipeline.contract.task import Classifier, HasProbabilities, HasQuantiles, Ranker, Regressor, Task, is_evaluated
from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from pipeline.contract.task import Batch, Outputs, Predictor


Array: TypeAlias = np.ndarray[Any, Any]
Columns: TypeAlias = dict[str, Array]

CANDIDATE, BASELINE = "candidate.", "baseline."  # prefixes of the columns of each model
PREDICTED = "predicted"  # class index, number, score or number per horizon; next to one column per metric
PROBABILITIES = "probabilities"  # one row per sample
QUANTILES = "quantiles"  # a row per horizon of each sample
OUTPUTS = (PREDICTED, PROBABILITIES, QUANTILES)
ACTUAL, QUERY, LEVELS, SLICE = "actual", "query", "levels", "slice."  # columns that describe the samples

_SUM_TOLERANCE = 1e-3  # of the probabilities of a sample


def candidate_predictor(model: nn.Module, task: Task, device: torch.device) -> Predictor:
    """Return a predictor that runs the model on its device and moves the outputs to the CPU."""

    def predict(batch: Batch) -> Outputs:
        outputs = forward(model, task, {name: batch[name].to(device) for name in task.inputs})
        if isinstance(outputs, Tensor):
            return outputs.cpu()
        return {name: tensor.cpu() for name, tensor in outputs.items()}

    return predict


@torch.inference_mode()
def score_batch(task: Task, predict: Predictor, batch: Batch) -> Columns:
    """Return the task's metrics for each sample, and the predicted classes, numbers and probabilities.

    Nothing for a task without metrics().
    """
    count, outputs = batch_length(batch), predict(batch)
    if not is_evaluated(task):
        return {}
    values = task.metrics(outputs, batch)
    if not isinstance(values, Mapping) or not values:
        raise DataError("metrics(): must return a mapping of metric names to one value per sample")
    metrics = {name: _check_metric(name, value, count) for name, value in values.items()}
    if reserved := sorted({*OUTPUTS} & metrics.keys()):
        raise DataError(f"metrics(): {reserved[0]!r} is a reserved name; to fix it: give the metric another name")
    return metrics | predicted_columns(task, outputs, count)


def predicted_columns(task: Task, outputs: Outputs, count: int) -> Columns:
    """Return the predicted classes, numbers and probabilities, where the task has them."""
    if isinstance(task, Classifier):
        columns = {PREDICTED: check_classes(task, "predicted", task.predicted(outputs), count)}
        if isinstance(task, HasProbabilities):
            columns[PROBABILITIES] = _probabilities(task.probabilities(outputs), count, len(task.classes))
        return columns
    if isinstance(task, HasProbabilities):
        raise DataError("probabilities(): needs `classes`, predicted() and actual() too")
    if not isinstance(task, Regressor):
        return {}
    columns = {PREDICTED: _check_numbers(task, "predicted", task.predicted(outputs), count)}
    if isinstance(task, HasQuantiles):
        if columns[PREDICTED].ndim == 1:
            raise DataError("predicted_quantiles(): needs predicted() and actual() of shape (samples, horizons)")
        value, shape = task.predicted_quantiles(outputs), (*columns[PREDICTED].shape, len(task.quantiles))
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            raise DataError(f"predicted_quantiles(): must have shape {shape}, not {_describe(value)}")
        columns[QUANTILES] = _as_floats(value)
    return columns


def _check_numbers(task: Regressor, method: str, value: object, count: int) -> Array:
    """Check what predicted() or actual() of a task without classes returned; a ranker has no horizons."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else ()
    is_forecast = len(shape) == 2 and shape[1] > 0 and not isinstance(task, Ranker)
    if not isinstance(value, Tensor) or shape[:1] != (count,) or len(shape) != 1 + is_forecast:
        text = "" if isinstance(task, Ranker) else f", or one for each horizon, shape ({count}, horizons)"
        raise DataError(f"{method}(): must be one number per sample, shape ({count},){text}, not {_describe(value)}")
    return _as_floats(value)


def _as_floats(value: Tensor) -> Array:
    """Return numbers in 64 bits, those of forecasts in the bits that they have."""
    kind = torch.promote_types(value.dtype, torch.float32) if value.ndim > 1 else torch.float64
    return value.detach().cpu().to(kind).numpy()


def _describe(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _probabilities(value: object, count: int, classes: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count, classes):
        text = f"must have shape ({count}, {classes}), a row per sample, not {_describe(value)}"
        raise DataError(f"probabilities(): {text}")
    rows = value.detach().cpu().to(torch.float32).numpy()
    valid = np.isfinite(rows).all() and (rows >= 0).all() and (np.abs(rows.sum(axis=1) - 1) <= _SUM_TOLERANCE).all()
    if not valid:
        raise DataError("probabilities(): a row is not between 0 and 1 with a sum of 1; to fix it: apply a softmax")
    return rows


def check_classes(task: Classifier, method: str, value: Tensor, count: int) -> Array:
    """Check what predicted() or actual() of a classifier returned: class indices of these samples."""
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,) or value.is_floating_point():
        actual = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise DataError(f"{method}(): must be one integer per sample, shape ({count},), not {actual}")
    classes = value.detach().cpu().to(torch.int64).numpy()
    if ((classes < 0) | (classes >= len(task.classes))).any():
        raise DataError(f"{method}(): a class index is outside the {len(task.classes)} classes of the task")
    return classes


def actual_columns(task: Task, batch: Batch, count: int) -> Columns:
    """Return the true classes, numbers or relevances of the samples, and their queries, where the task has them."""
    if isinstance(task, Classifier):
        return {ACTUAL: check_classes(task, "actual", task.actual(batch), count)}
    if not isinstance(task, Regressor):
        return {}
    actual = _check_numbers(task, "actual", task.actual(batch), count)
    if not np.isfinite(actual).all():
        raise DataError("actual(): a label of the test data is not a finite number")
    if isinstance(task, HasQuantiles):
        return {ACTUAL: actual, LEVELS: np.tile(np.asarray(task.quantiles, np.float64), (count, 1))}
    if not isinstance(task, Ranker):
        return {ACTUAL: actual}
    if (actual < 0).any():
        raise DataError("actual(): the relevance of an item must be 0 or more")
    return {ACTUAL: actual, QUERY: _queries(task.queries(batch), count)}


def _queries(value: object, count: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,) or value.is_floating_point():
        raise DataError(f"queries(): must be one integer per sample, shape ({count},)")
    return value.detach().cpu().numpy().astype(np.int64)


def batch_length(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def join_parts(parts: list[Columns]) -> Columns:
    """Concatenate parts, each with the same columns; parts without samples are skipped."""
    filled = [part for part in parts if part]
    names = list(filled[0]) if filled else []
    for part in filled:
        if differing := sorted(set(names) ^ set(part)):
            raise DataError(f"metrics(): {', '.join(differing)} is returned for some batches and not for others")
    return {name: np.concatenate([part[name] for part in filled]) for name in names}


def _check_metric(name: str, value: object, count: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,):
        text = f"must be a tensor of one value per sample, shape ({count},), not {_describe(value)}"
        raise DataError(f"metrics(): {name} {text}")
    return value.detach().cpu().to(torch.float64).numpy()
