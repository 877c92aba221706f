"""What is known of the samples themselves, whoever predicts: the truth, their queries, and the slices they are in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from evaluate.columns import ACTUAL, QUERY, SLICE, Array, Columns
from evaluate.prediction import classes_of, count_of, numbers_of
from evaluate.slices import CLASS
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.task import Classifier, HasSlices, Ranker, Regressor, Task

if TYPE_CHECKING:
    from pipeline.spec.task import Batch

_MOST_LABELS = 1000


def truth(task: Task, batch: Batch, columns: Sequence[str]) -> Columns:
    """`columns` are those of the data to slice by."""
    count = count_of(batch)
    return _actual(task, batch, count) | _by_column(batch, columns) | _by_task(task, batch, count)


def check_labels(columns: Columns) -> None:
    """Of the whole test set: a slice is a group of samples, not a name for each."""
    for name in (name for name in columns if name.startswith(SLICE)):
        if (found := len(np.unique(columns[name]))) > _MOST_LABELS:
            raise DataError(
                f"slices: `{name.removeprefix(SLICE)}` has {found} labels, {_MOST_LABELS} at most; group them"
            )


def _actual(task: Task, batch: Batch, count: int) -> Columns:
    if isinstance(task, Classifier):
        return {ACTUAL: classes_of(task, "actual", task.actual(batch), count)}
    if not isinstance(task, Regressor):
        return {}
    actual = numbers_of("actual", task.actual(batch), count)
    if not np.isfinite(actual).all():
        raise DataError("actual(): a true value of the test data is not a finite number")
    if not isinstance(task, Ranker):
        return {ACTUAL: actual}
    if (actual < 0).any():
        raise DataError("actual(): how relevant an item is must be 0 or more")
    return {ACTUAL: actual, QUERY: _queries(task.queries(batch), count)}


def _queries(value: object, count: int) -> Array:
    if not isinstance(value, Tensor) or tuple(value.shape) != (count,) or value.is_floating_point():
        raise DataError(f"queries(): must be one whole number per sample, shape ({count},)")
    return value.detach().cpu().numpy().astype(np.int64)


def _by_column(batch: Batch, names: Sequence[str]) -> Columns:
    found = {}
    for name in names:
        if name not in batch:
            raise ConfigError(f"evaluate.slices: the test data have no column {name} (columns: {', '.join(batch)})")
        column = batch[name]
        if column.ndim != 1 or column.is_floating_point():
            raise ConfigError(f"evaluate.slices: column {name} must hold one whole number per sample; group it first")
        found[SLICE + name] = column.detach().cpu().numpy().astype(np.int64).astype(np.str_)
    return found


def _by_task(task: Task, batch: Batch, count: int) -> Columns:
    if not isinstance(task, HasSlices):
        return {}
    given = task.slices(batch)
    if not isinstance(given, Mapping):
        raise DataError("slices(): must return a mapping of names to one label per sample")
    return {SLICE + name: _labels(name, labels, count) for name, labels in given.items()}


def _labels(name: object, labels: object, count: int) -> Array:
    if not isinstance(name, str) or not name or "=" in name:
        raise DataError(f"slices(): {name!r} is no name for slices; use a word without an equals sign")
    if name == CLASS:
        raise DataError(f"slices(): `{CLASS}` is the true class already; give these slices another name")
    right = isinstance(labels, Sequence) and not isinstance(labels, str) and all(isinstance(one, str) for one in labels)
    if not right or len(labels) != count:  # type: ignore[arg-type]
        raise DataError(f"slices(): `{name}` must be one text for each of {count} samples")
    return np.array(list(labels), dtype=np.str_)  # type: ignore[call-overload]
