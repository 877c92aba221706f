"""A uniform view of a split: any set of sample indices as one batch of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from pipeline.spec.errors import DataError

if TYPE_CHECKING:
    from pipeline.spec.task import Outputs, Split, Task


class Samples:
    """One split of a task."""

    def __init__(self, split: str, source: Split) -> None:
        self.split = split
        self._items: Any = source
        self._columns = _as_columns(split, source) if isinstance(source, Mapping) else None
        first: Any = next(iter(self._columns.values())) if self._columns else source
        try:
            self._count = len(first)
        except TypeError as error:
            raise DataError(
                f"data({split!r}): must return columns of equal length, or a map-style data set with a length; "
                f"found {type(source).__name__}"
            ) from error
        if self._count == 0:
            raise DataError(f"data({split!r}): the split is empty")

    @property
    def in_memory(self) -> bool:
        return self._columns is not None

    @property
    def columns(self) -> Mapping[str, Tensor] | None:
        """The whole split at once, where it is in memory."""
        return self._columns

    def __len__(self) -> int:
        return self._count

    def first(self, count: int) -> Samples:
        """Only the first so many; 0: all."""
        if not 0 < count < len(self):
            return self
        if self._columns is not None:
            return Samples(self.split, {name: column[:count] for name, column in self._columns.items()})
        return Samples(self.split, Subset(self._items, range(count)))

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """The samples at these indices, in this order; columns are indexed at once, items collated."""
        if self._columns is not None:
            index = torch.as_tensor(indices)
            return {name: column[index] for name, column in self._columns.items()}
        batch = default_collate([self._items[int(i)] for i in indices])
        if not isinstance(batch, dict):
            raise DataError(f"data({self.split!r}): an item must be a mapping of column names to values")
        for name, column in batch.items():
            if not isinstance(column, Tensor):
                raise DataError(f"data({self.split!r}): column `{name}` must hold numbers or tensors")
        return batch

    def batches(self, indices: range, size: int) -> Iterator[dict[str, Tensor]]:
        """Consecutive samples in batches of `size`, the last one smaller."""
        for start in range(indices.start, indices.stop, size):
            yield self.batch(range(start, min(start + size, indices.stop)))


def open_split(task: Task, split: str) -> Samples:
    return Samples(split, task.data(split))


def check_columns(task: Task, samples: Samples) -> None:
    """The model's declared inputs are columns of the data."""
    found = samples.batch([0])
    if missing := [name for name in task.inputs if name not in found]:
        raise DataError(
            f"data({samples.split!r}): no column {', '.join(missing)}, which the task names as an input "
            f"(columns: {', '.join(found)})"
        )


def forward(model: Any, task: Task, batch: Mapping[str, Tensor]) -> Outputs:
    """Call the model on its declared inputs; see `named`."""
    return bare(task, named(task, model(*[batch[name] for name in task.inputs])))


def named(task: Task, returned: Any) -> dict[str, Tensor]:
    """What a model returned, as a mapping by the declared output names."""
    names = list(task.outputs)
    if isinstance(returned, Tensor):
        returned = (returned,)
    if isinstance(returned, Mapping):
        returned = [returned.get(name) for name in names]
    values = list(returned) if isinstance(returned, list | tuple) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not len(values) == len(tensors) == len(names):
        raise DataError(f"the model must return the tensors named in `outputs` ({', '.join(names)})")
    return dict(zip(names, tensors, strict=True))


def bare(task: Task, outputs: Mapping[str, Tensor]) -> Outputs:
    """What loss() and metrics() receive: the tensor itself when the task declares a single output."""
    return outputs[task.outputs[0]] if len(task.outputs) == 1 else outputs


def _as_columns(split: str, source: Mapping[str, Any]) -> dict[str, Tensor]:
    columns = {name: _as_column(split, name, value) for name, value in source.items()}
    if not columns:
        raise DataError(f"data({split!r}): has no columns")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"data({split!r}): columns differ in length ({sizes})")
    return columns


def _as_column(split: str, name: str, value: Any) -> Tensor:
    try:
        column = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data({split!r}): column `{name}` is no array of numbers: {error}") from error
    if column.ndim == 0:
        raise DataError(f"data({split!r}): column `{name}` is a single number, not one value per sample")
    return column
