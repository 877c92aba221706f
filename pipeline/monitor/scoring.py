"""Score samples of the live service with the task's own metrics, once their labels are known."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipeline.contract.data import as_task_outputs
from pipeline.contract.run import describe
from pipeline.contract.samples import INPUT, OUTPUT
from pipeline.contract.signature import NUMPY_TYPES, Signature
from pipeline.contract.task import Classifier, Task, is_evaluated
from pipeline.data_checks.profile import ColumnSummary
from pipeline.statistics.scores import Columns, predicted_columns, score_batch
from pipeline.system.errors import DataError
from pipeline.system.sources import SOURCE_ROOT

Batch = dict[str, Tensor]


class WrongLabel(Exception):
    """A label that cannot be the answer to its request."""


class Scorer:
    """The task with what its metrics need of a sample: some inputs, and the columns of the label."""

    def __init__(self, task: Task, signature: Signature, labels: Mapping[str, ColumnSummary]) -> None:
        self._task, self._labels, self.is_evaluated = task, labels, is_evaluated(task)
        self._types = {INPUT + spec.name: NUMPY_TYPES[spec.datatype] for spec in signature.inputs}
        self._types |= {OUTPUT + spec.name: NUMPY_TYPES[spec.datatype] for spec in signature.outputs}
        self.classes = list(map(str, task.classes)) if isinstance(task, Classifier) else None
        self._needed: set[str] | None = None

    def batches(self, table: pa.Table) -> Iterator[tuple[range, Batch]]:
        """Yield rows with their arrays; those whose arrays have different shapes come one by one."""
        tensors: Batch = {}
        for name in set(table.column_names) & {name for name, kind in self._types.items() if kind != "object"}:
            column = table[name].combine_chunks()
            if column.null_count == len(column):
                continue
            array = _dense(column)
            if array is None and len(column) > 1:
                for i in range(table.num_rows):
                    yield from ((range(i, i + 1), batch) for _, batch in self.batches(table.slice(i, 1)))
                return
            if array is not None:
                tensors[name] = torch.from_numpy(array.astype(self._types[name]))
        yield range(table.num_rows), tensors

    def answers(self, batch: Batch) -> Columns | None:
        """Return what the task reads from the outputs; None if it cannot."""
        try:
            return predicted_columns(self._task, self._outputs(batch), _length(batch))
        except Exception:  # of user code, or for outputs such as NaN
            return None

    def waiting_columns(self, batch: Batch) -> list[str]:
        """Return the columns that are needed once the label is known."""
        inputs = {name for name in batch if name.startswith(INPUT) and name.removeprefix(INPUT) in self.needed(batch)}
        return sorted(inputs | {name for name in batch if name.startswith(OUTPUT)})

    def needed(self, batch: Batch) -> set[str]:
        """Return the columns that the metrics read, found by calling them with labels that are zeros."""
        if self._needed is None:
            count = _length(batch)
            zeros = {
                name: torch.zeros((count, *summary.shape), dtype=getattr(torch, summary.dtype))
                for name, summary in self._labels.items()
            }
            recorder = _Recorder(self._inputs(batch) | zeros)
            try:
                score_batch(self._task, lambda _: self._outputs(batch), recorder)
                self._needed = recorder.read
            except Exception:  # zeros may be no label
                self._needed = set(recorder)
        return self._needed

    def score(self, batch: Batch, labels: Sequence[Any]) -> Columns:
        """Return the metrics of each row; raise WrongLabel where a label is not of the task's type."""
        names = [name for name in self._labels if name in self.needed(batch)]
        rows = [self._label_row(names, label) for label in labels]
        columns = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in names}
        inputs = self._inputs(batch) | columns
        first = inputs or {"": torch.zeros(len(labels))}
        try:
            return score_batch(self._task, lambda _: self._outputs(batch), first)
        except Exception as error:
            raise WrongLabel(f"the task cannot score it: {describe(error, SOURCE_ROOT)}") from error

    def _label_row(self, names: Sequence[str], label: Any) -> dict[str, np.ndarray[Any, Any]]:
        if len(names) == 1:
            return {names[0]: self._convert(names[0], label)}
        if not names:
            raise WrongLabel("the task's metrics read no label")
        if not isinstance(label, Mapping) or (missing := [name for name in names if name not in label]):
            example = ", ".join(f'"{name}": …' for name in names)
            raise WrongLabel(f"must be an object {{{example}}}, found {_shorten(label)}") from None
        assert not missing
        return {name: self._convert(name, label[name]) for name in names}

    def _convert(self, name: str, label: Any) -> np.ndarray[Any, Any]:
        summary = self._labels[name]
        if isinstance(label, Mapping) and name in label:
            label = label[name]
        is_index = self.classes is not None and not summary.shape and "int" in summary.dtype
        if isinstance(label, str):
            label = self._parse_text(label)
        expected = f"{summary.dtype} of shape {list(summary.shape)}" if summary.shape else summary.dtype
        expected = "one of the classes, by name or index" if is_index else expected
        kinds = "b" if summary.dtype == "bool" else "iuf" if "float" in summary.dtype else "iu"
        with contextlib.suppress(ValueError), np.errstate(over="ignore"):  # of lists of different lengths
            array = np.asarray(label)
            array = array.reshape(summary.shape) if summary.shape == (1,) else array
            typed = array.astype(summary.dtype) if array.dtype.kind in kinds else np.empty(0)
            is_equal = bool((typed == array).all()) if kinds == "iu" and typed.shape == array.shape else True
            if typed.shape == summary.shape and np.isfinite(typed).all() and is_equal:
                if is_index and self.classes is not None and not 0 <= typed < len(self.classes):
                    raise WrongLabel(f"{label} is not one of {len(self.classes)} classes")
                return typed
        raise WrongLabel(f"must be {expected}, found {_shorten(label)}")

    def _parse_text(self, text: str) -> Any:
        """Return the index of a class, or what a text such as a cell of a CSV file means."""
        if self.classes is not None and text in self.classes:
            return self.classes.index(text)
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _inputs(self, batch: Batch) -> Batch:
        return {name.removeprefix(INPUT): column for name, column in batch.items() if name.startswith(INPUT)}

    def _outputs(self, batch: Batch) -> Any:
        outputs = {name.removeprefix(OUTPUT): column for name, column in batch.items() if name.startswith(OUTPUT)}
        return as_task_outputs(self._task, outputs)


def _length(batch: Batch) -> int:
    if not batch:
        raise DataError("a sample has no arrays")
    return len(next(iter(batch.values())))


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


class _Recorder(dict[str, Tensor]):
    """A batch that remembers which columns were read."""

    def __init__(self, columns: Batch) -> None:
        super().__init__(columns)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def _dense(column: pa.Array) -> np.ndarray[Any, Any] | None:
    """Return nested lists as an array; None if their lengths differ, or if one is missing."""
    shape = [len(column)]
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        lengths = np.diff(column.offsets.to_numpy())
        if column.null_count or len(np.unique(lengths)) > 1:
            return None
        shape.append(int(lengths[0]) if len(lengths) else 0)
        column = column.flatten()
    if column.null_count:
        return None
    values = column.to_numpy(zero_copy_only=False)
    return np.asarray(values).reshape(shape) if values.size == math.prod(shape) else None
