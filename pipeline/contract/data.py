"""Batches of a split, streams, digests of samples, and sequence packing.

`Samples` gives any set of sample indices as one batch of tensors, also of a stream, which it reads in order. Packing
puts several texts into rows of equal length, so that little of the computation is padding; `mask_between_texts` keeps
the attention of a transformers model within each text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, default_collate

from pipeline.contract.task import BATCH, HasCollate, Outputs, Split, Task, input_axes, max_axis_sizes, shortest_sizes
from pipeline.system.errors import ConfigError, DataError
from pipeline.system.files import digest_bytes, read_object

Collate: TypeAlias = "Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Tensor]]"
_TRACED = 32  # samples among which one to trace with is looked for
_ENDS = 2  # samples of a stream that stand for all in checks before training


class Samples:
    """One split of a task. A stream whose length is not known is read once to count its samples."""

    def __init__(
        self, split: str, source: Split, collate: Collate | None = None, count: int = 0, whole: bool = True
    ) -> None:
        self.split, self.source, self._collate = split, source, collate
        self._items: Any = source
        self._columns: dict[str, Tensor] | None = None
        self._stream: Stream | None = None
        if isinstance(source, Mapping) and collate is None:
            self._columns = _as_columns(split, source)
        elif isinstance(source, Mapping):
            self._items = _Rows(split, source)
        elif is_stream(source):
            self._stream = Stream(split, source, count, whole)
            if split == "test":  # evaluation and export read it many times
                self._items, self._stream = _read_into_memory(self._stream), None
        self._count = self._measure()
        if self._count == 0:
            raise DataError(f"data({split!r}): the split is empty")

    def _measure(self) -> int:
        measured: Any = self._items if self._stream is None else self._stream
        if self._columns:
            measured = next(iter(self._columns.values()))
        try:
            return len(measured)
        except TypeError as error:
            raise DataError(
                f"data({self.split!r}): must return columns of equal length, a map-style data set with a length, or a "
                f"stream that can be read several times, such as an IterableDataset; found {type(self.source).__name__}"
            ) from error

    @property
    def in_memory(self) -> bool:
        return self._columns is not None

    @property
    def is_stream(self) -> bool:
        return self._stream is not None

    @property
    def has_collate(self) -> bool:
        return self._collate is not None

    @property
    def columns(self) -> Mapping[str, Tensor] | None:
        """The whole split, if it is in memory."""
        return self._columns

    @property
    def ends(self) -> list[int]:
        """Return two samples to try before training: the first and the last one, if that is not the end of a stream."""
        return [0, min(_ENDS, len(self)) - 1] if self.is_stream else [0, len(self) - 1]

    def __len__(self) -> int:
        return self._count

    def first(self, count: int) -> Samples:
        """Return the first `count` samples; 0: all."""
        if not 0 < count < len(self):
            return self
        if self._columns is not None:
            return Samples(self.split, {name: column[:count] for name, column in self._columns.items()})
        if self._stream is not None:
            return Samples(self.split, self.source, self._collate, count, whole=False)
        return Samples(self.split, Subset(self._items, range(count)), self._collate)

    def rearranged(self, indices: Sequence[int]) -> Samples:
        """Return the samples at these indices as a split; not for streams."""
        if self._columns is not None:
            return Samples(self.split, self.batch(indices))
        return Samples(self.split, Subset(self._items, indices), self._collate)

    def collated(self) -> Samples:
        """Return the split as columns, if the task has collate(): all samples as one batch, to have one shape."""
        if self._collate is None:
            return self
        return Samples(self.split, self.batch(range(len(self))))

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any], epoch: int = 0) -> dict[str, Tensor]:
        """Return the samples at these indices, in this order, as one batch; only streams may depend on the epoch."""
        if self._columns is not None:
            index = torch.as_tensor(indices)
            return {name: column[index] for name, column in self._columns.items()}
        return self.collate(self.load(indices, epoch))

    def load(self, indices: Sequence[int] | np.ndarray[Any, Any], epoch: int = 0) -> list[Mapping[str, Any]]:
        """Return samples as the data set gives them."""
        if self._stream is not None:
            items = self._stream.load(indices, epoch)
        else:
            items = [self._items[int(i)] for i in indices]
        if not isinstance(items[0], Mapping):
            raise DataError(f"data({self.split!r}): an item must be a mapping of column names to values")
        return items

    def seek(self, position: int, epoch: int) -> None:
        """Pass over the samples of a stream before this one."""
        if self._stream is not None:
            self._stream.seek(position, epoch)

    def collate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return samples as one batch."""
        if self._collate is not None:
            return _checked_batch(self._collate(items), len(items))
        try:
            batch = default_collate(list(items))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            if message := _difference(items):
                raise DataError(f"data({self.split!r}): {message}") from error
            raise
        for name, column in batch.items():
            if not isinstance(column, Tensor):
                raise DataError(f"data({self.split!r}): column `{name}` must hold numbers or tensors")
        return dict(batch)

    def batches(self, indices: range, size: int) -> Iterator[dict[str, Tensor]]:
        """Yield consecutive samples in batches of `size`; the last one may be smaller."""
        for start in range(indices.start, indices.stop, size):
            yield self.batch(range(start, min(start + size, indices.stop)))

    def single_rows(self, indices: range) -> Iterator[dict[str, Tensor]]:
        """Yield consecutive samples for digests: each by itself where a batch pads it to the length of others."""
        yield from self.batches(indices, 1 if self.has_collate else _BATCH)


class _Rows:
    """Columns as a map-style data set: their values may differ in length."""

    def __init__(self, split: str, columns: Mapping[str, Any]) -> None:
        _check_equal_lengths(split, columns)
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


def _checked_batch(batch: Any, count: int) -> dict[str, Tensor]:
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"collate(): must return a mapping of column names to tensors, not {type(batch).__name__}")
    for name, column in batch.items():
        if not isinstance(column, Tensor) or column.ndim == 0 or len(column) != count:
            shape = f"shape {tuple(column.shape)}" if isinstance(column, Tensor) else type(column).__name__
            raise DataError(
                f"collate(): column `{name}` must be a tensor with one row for each of {count} samples; found {shape}"
            )
    return dict(batch)


def _difference(items: Sequence[Mapping[str, Any]]) -> str:
    """Return how samples differ so that they do not fit into one batch; empty if their shapes are equal."""
    for name, value in items[0].items():
        if without := next((item for item in items if name not in item), None):
            return f"a sample has no column `{name}` (its columns: {', '.join(without)})"
        shapes = [_shape(item[name]) for item in items]
        if other := next((shape for shape in shapes if shape != _shape(value)), None):
            return _unequal(name, shapes[0], other)
    return ""


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else (len(value),) if hasattr(value, "__len__") else ()


def _unequal(name: str, first: tuple[int, ...], second: tuple[int, ...]) -> str:
    are_lengths = len(first) == len(second) == 1
    values = f"lengths {first[0]} and {second[0]}" if are_lengths else f"shapes {first} and {second}"
    return (
        f"column `{name}` has samples of {values}, which do not fit into one batch; to fix it: give the task "
        "collate(samples), which pads them, or make them equal"
    )


_MAX_TEST_BYTES = 4 << 30  # of a stream that is read into memory


def is_stream(source: Any) -> bool:
    """Return whether a split has samples in order, without access by index."""
    return isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not hasattr(source, "__getitem__"))


class Stream:
    """A source that is read in order, from the beginning in each epoch.

    An item may be a function without arguments that returns the sample, so that samples of others cost nothing. Two
    methods of the source are used if it has them: `set_epoch(epoch)` for another order in each epoch, and
    `start_at(position)`, which returns an iterator that begins there.
    """

    def __init__(self, split: str, source: Any, count: int = 0, whole: bool = True) -> None:
        if iter(source) is source:
            raise DataError(
                f"data({split!r}): a {type(source).__name__} can be read only once, but each epoch reads the split "
                "again; to fix it, return an object whose __iter__ begins again, such as an IterableDataset"
            )
        self._split, self._source = split, source
        self._iterator: Iterator[Any] = iter(())
        self._place: tuple[int, int, int] | None = None  # process, epoch and position of the next item
        length = len(source) if hasattr(source, "__len__") else 0
        self._count = count or length or sum(1 for _ in self._open(0, 0))
        self._whole = whole

    def __len__(self) -> int:
        return self._count

    def load(self, positions: Sequence[int] | np.ndarray[Any, Any], epoch: int) -> list[Mapping[str, Any]]:
        """Return the samples at these positions, read in one pass if the stream is before them."""
        items = {position: self._next(position, epoch) for position in np.unique(positions).tolist()}
        return [items[int(position)] for position in positions]

    def seek(self, position: int, epoch: int) -> None:
        process = os.getpid()  # a forked process must not share the position of open files with its parent
        if self._place is None or self._place[:2] != (process, epoch) or self._place[2] > position:
            start = position if hasattr(self._source, "start_at") else 0
            self._iterator, self._place = self._open(start, epoch), (process, epoch, start)
        for place in range(self._place[2], position):
            self._take(place)
        self._place = (process, epoch, position)

    def _open(self, position: int, epoch: int) -> Iterator[Any]:
        if hasattr(self._source, "set_epoch"):
            self._source.set_epoch(epoch)
        return iter(self._source.start_at(position) if position else self._source)

    def _next(self, position: int, epoch: int) -> Any:
        self.seek(position, epoch)
        item = self._take(position)
        self._place = (os.getpid(), epoch, position + 1)
        if position + 1 == self._count and self._whole and next(self._iterator, None) is not None:
            raise DataError(
                f"data({self._split!r}): the stream has more samples than the {self._count} of its length; to fix it: "
                "make its __len__ exact or leave it out, and return the same samples each time"
            )
        return item() if callable(item) else item

    def _take(self, position: int) -> Any:
        try:
            return next(self._iterator)
        except StopIteration as error:
            raise DataError(
                f"data({self._split!r}): the stream ended after {position} of {self._count} samples; to fix it, make "
                "it give the same samples in the same order each time, in every process"
            ) from error


def _read_into_memory(stream: Stream) -> list[Mapping[str, Any]]:
    items, size = [], 0
    for position in range(len(stream)):
        (item,) = stream.load([position], 0)
        size += sum(getattr(value, "nbytes", 0) or sys.getsizeof(value) for value in dict(item).values())
        if size > _MAX_TEST_BYTES:
            raise DataError(
                f"data('test'): the stream has more than {_MAX_TEST_BYTES >> 30} GiB, too much to keep in memory; to "
                "fix it, return fewer samples, or a map-style data set"
            )
        items.append(item)
    return items


def open_split(task: Task, split: str, prepared: Path | None = None) -> Samples:
    """Open a split; the folder of the prepare step has the length of a stream without one."""
    source = task.data(split)
    count = 0
    if prepared is not None and is_stream(source) and not hasattr(source, "__len__"):
        count = read_object(prepared / "data.json", "splits", split, "samples")
    return Samples(split, source, task.collate if isinstance(task, HasCollate) else None, count)


def check_columns(task: Task, samples: Samples) -> None:
    """Check that the declared inputs are columns of the data."""
    columns = samples.batch([0])
    if missing := [name for name in task.inputs if name not in columns]:
        raise DataError(
            f"data({samples.split!r}): no column {', '.join(missing)}, which the task names as an input "
            f"(columns: {', '.join(columns)})"
        )


def axis_sizes(task: Task, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of each named axis in a batch; raise where the data contradict `axes`, or do not suit the export.

    The exporter would merge axes of equal size, and treat a size of 1 as fixed.
    """
    sizes: dict[str, int] = {}
    for name, axes in input_axes(task).items():
        for position, axis in enumerate(axes):
            size = batch[name].shape[position] if position < batch[name].ndim else 0
            if isinstance(axis, int):
                if size != axis:
                    raise DataError(
                        f"`axes` has {axis} for axis {position} of `{name}`, which is {size} in the test data"
                    )
                continue
            if sizes.setdefault(axis, size) != size:
                raise DataError(f"axis `{axis}` is {size} long in `{name}`, and {sizes[axis]} in another input")
            if size < 2:
                raise DataError(f"axis `{axis}` of `{name}` is {size} long in the test data; show one of 2 at least")
    if limit := exceeded_limit(task, batch):
        raise DataError(f"test data: {limit}")
    if len(set(sizes.values())) != len(sizes):
        sizes_text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise DataError(
            f"axes of different names have one size in the test data ({sizes_text}), and the export would join them; "
            "to fix it: give the first test samples different sizes, or both axes one name"
        )
    return sizes


def named_sizes(task: Task, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of each axis that the task names."""
    axes = [(name, *place) for name, axes_of_input in input_axes(task).items() for place in enumerate(axes_of_input)]
    return {axis: batch[name].shape[position] for name, position, axis in axes if isinstance(axis, str)}


def exceeded_limit(task: Task, batch: Mapping[str, Tensor]) -> str:
    """Return which axis of a batch is longer or shorter than the task allows; empty if none is."""
    sizes, shortest = named_sizes(task, batch), shortest_sizes(task)
    for axis, longest in max_axis_sizes(task).items():
        if not shortest[axis] <= sizes[axis] <= longest:
            return f"axis `{axis}` is {sizes[axis]} long; `shortest` and `longest` allow {shortest[axis]} to {longest}"
    return ""


def example_batch(task: Task, samples: Samples) -> dict[str, Tensor]:
    """Return a batch to trace with, whose size differs from that of every other dynamic axis.

    Its sample is shorter than the longest on every axis, if possible: a trace at the longest may fix that size.
    """
    longest, first = max_axis_sizes(task), 0
    for index in range(min(_TRACED, len(samples)) if longest else 0):
        sizes = named_sizes(task, samples.batch([index]))
        if all(1 < sizes[axis] < most for axis, most in longest.items()):
            first = index
            break
    used_sizes = {size for axis, size in named_sizes(task, samples.batch([first])).items() if axis != BATCH}
    rows = next(count for count in range(3, 4 + len(used_sizes)) if count not in used_sizes)
    return samples.batch([first] * rows if longest else [index % len(samples) for index in range(rows)])


@contextlib.contextmanager
def standard_attention() -> Iterator[None]:
    """Switch off the fast path that torch's transformer layers take for inference.

    It has no form in ONNX, and returns zeros for padded positions, which no graph does.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


def forward(model: Any, task: Task, batch: Mapping[str, Tensor]) -> Outputs:
    """Call the model on its declared inputs and return the outputs as loss() and metrics() receive them.

    Its attention is computed as the exported graph does, so that what is evaluated is what is served.
    """
    try:
        with standard_attention():
            returned = model(*[batch[name] for name in task.inputs])
    except TypeError:
        check_call(task, model)
        raise
    return as_task_outputs(task, name_outputs(task, returned))


def check_call(task: Task, model: Any) -> None:
    """Check that the model's forward() takes the inputs in this order."""
    names, call = list(task.inputs), inspect.signature(model.forward if hasattr(model, "forward") else model)
    called = f"the model is called with `inputs` in order ({', '.join(names)}), but its forward{call}"
    try:
        call.bind(*names)
    except TypeError as error:
        raise ConfigError(
            f"{called} does not take them: {error}; name all inputs in the order of forward's arguments, none of which "
            "may be keyword-only"
        ) from error
    parameters = list(call.parameters)
    if set(names) <= set(parameters) and parameters[: len(names)] != names:
        raise ConfigError(f"{called} has them in another order; write `inputs` in the order of its arguments")


def name_outputs(task: Task, returned: Any) -> dict[str, Tensor]:
    """Return a model's outputs by the declared names: a tensor, a sequence in order, or named values, also nested.

    Named values are a mapping, a dataclass or a named tuple; `heads.box` is `box` in what is called `heads`.
    """
    names = list(task.outputs)
    if isinstance(returned, Tensor):
        values: list[Any] = [returned]
    elif (named := _named_values(returned)) is not None and (
        not isinstance(returned, tuple) or all(name.partition(".")[0] in named for name in names)
    ):
        values = [_find_value(named, name) for name in names]
    else:
        values = list(returned) if isinstance(returned, list | tuple) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not len(values) == len(tensors) == len(names):
        raise DataError(
            f"the model must return the tensors named in `outputs` ({', '.join(names)}), but it returned "
            f"{_describe_output(returned)}; change `outputs`, or what the model returns"
        )
    return dict(zip(names, tensors, strict=True))


def _named_values(returned: Any) -> Mapping[str, Any] | None:
    if isinstance(returned, Mapping):
        return returned
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        return {field.name: getattr(returned, field.name) for field in dataclasses.fields(returned)}
    return dict(returned._asdict()) if isinstance(returned, tuple) and hasattr(returned, "_asdict") else None


def _find_value(named: Mapping[str, Any], name: str) -> Any:
    """Return the value of a name or, for `a.b`, the value `b` in `a`; None if there is none."""
    if name in named:
        return named[name]
    first, _, rest = name.partition(".")
    inner = _named_values(named.get(first)) if rest else None
    return None if inner is None else _find_value(inner, rest)


def _describe_output(returned: Any, depth: int = 2) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {list(returned.shape)}"
    kind = type(returned).__name__
    if (named := _named_values(returned)) is not None:
        return f"a {kind} with {', '.join(map(str, named)) or 'nothing'}"
    if isinstance(returned, list | tuple) and depth:
        items = ", ".join(_describe_output(item, depth - 1) for item in returned[:_MAX_DESCRIBED])
        return f"a {kind} of {len(returned)} ({items}{', …' if len(returned) > _MAX_DESCRIBED else ''})"
    return "None" if returned is None else f"a {kind}"


_MAX_DESCRIBED = 4  # parts of what a model returned, in an error


def as_task_outputs(task: Task, outputs: Mapping[str, Tensor]) -> Outputs:
    """Return what loss() and metrics() receive: the tensor itself if the task declares a single output."""
    return outputs[task.outputs[0]] if len(task.outputs) == 1 else outputs


def _as_columns(split: str, source: Mapping[str, Any]) -> dict[str, Tensor]:
    columns = {name: _as_column(split, name, value) for name, value in source.items()}
    _check_equal_lengths(split, columns)
    return columns


def _check_equal_lengths(split: str, columns: Mapping[str, Any]) -> None:
    if not columns:
        raise DataError(f"data({split!r}): has no columns")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"data({split!r}): columns differ in length ({sizes})")


def _as_column(split: str, name: str, value: Any) -> Tensor:
    try:
        column = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(value, list | tuple | np.ndarray) and len(value) and isinstance(value[0], str):
            raise DataError(
                f"data({split!r}): column `{name}` has texts, as {str(value[0])!r}; a model takes numbers: give the "
                "index of a class in `classes`, or the tokens of a text"
            ) from error
        if isinstance(value, list | tuple | np.ndarray) and (message := _difference([{name: row} for row in value])):
            raise DataError(f"data({split!r}): {message}") from error
        raise DataError(f"data({split!r}): column `{name}` is not an array of numbers: {error}") from error
    if column.ndim == 0:
        raise DataError(f"data({split!r}): column `{name}` is a single number, not one value per sample")
    return column


_BATCH = 512

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Fingerprint:
    """The digest of a split: of every column of every sample in order, independent of the batch size."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Mapping[str, Tensor]) -> list[str]:
        """Add samples and return their digests."""
        digests = [digest_bytes(row) for row in _rows(batch, sorted(batch), prefixed=False)]
        for digest in digests:
            data = digest.encode()
            self._digest.update(len(data).to_bytes(8, "big") + data)
        return digests

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint(samples: Samples) -> str:
    digest = Fingerprint()
    for batch in samples.single_rows(range(len(samples))):
        digest.add(batch)
    return digest.hexdigest()


def sample_digests(samples: Samples, columns: Sequence[str]) -> list[str]:
    """Return one digest per sample over the named columns; equal digests are exact duplicates."""
    digests = []
    for batch in samples.single_rows(range(len(samples))):
        digests += [digest_bytes(row) for row in _rows(batch, sorted(columns), prefixed=True)]
    return digests


def batch_digests(batch: Mapping[str, Tensor], columns: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bytes_]]:
    """Return the first 16 bytes of each sample's digest, so that those of millions fit in memory."""
    rows = _rows(batch, sorted(columns), prefixed=True)
    return np.frombuffer(b"".join(hashlib.sha256(row).digest()[:16] for row in rows), dtype="S16")


def _rows(batch: Mapping[str, Tensor], names: Sequence[str], prefixed: bool) -> Iterator[bytes]:
    """Yield the bytes to hash of each sample, built for a whole batch at once: a torch call per value takes minutes."""
    parts = [part for name in names for part in _encode(name, batch[name], prefixed)]
    count = len(batch[names[0]])
    rows = np.concatenate([np.broadcast_to(part, (count, part.shape[-1])) for part in parts], axis=1)
    width, data = rows.shape[1], rows.tobytes()
    return (data[start : start + width] for start in range(0, count * width, width))


def _encode(name: str, column: Tensor, prefixed: bool) -> Iterator[Bytes]:
    value = column.detach().cpu().contiguous()
    shape = tuple(value.shape[1:])
    raw = value.reshape(-1).view(torch.uint8).reshape(len(value), math.prod(shape) * value.itemsize).numpy()
    for part in (f"{name}:{value.dtype}:{shape}:".encode(), raw):
        length = len(part) if isinstance(part, bytes) else part.shape[1]
        if prefixed:
            yield np.frombuffer(length.to_bytes(8, "big"), np.uint8)
        yield np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part


Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PackedRows:
    """Packed texts: `segments` numbers those of a row from 1, 0 is padding on the left; positions restart in each."""

    ids: Integers
    segments: Integers
    positions: Integers

    @property
    def padding(self) -> float:
        """The fraction of positions that are padding."""
        return float((self.segments == 0).mean())


def cut_texts(texts: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Split texts that are longer than a row; drop parts of a single token, which have nothing to predict."""
    pieces = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    return [piece for piece in pieces if len(piece) > 1]


def pack_texts(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """Pack texts into rows by first fit: each text goes into the first row with enough room."""
    rows: list[list[Sequence[int]]] = []
    free: list[int] = []
    first_row_with = [0] * (length + 1)  # lower bound of the first row with this much room
    for text in texts:
        text_length = min(len(text), length)  # a longer text is rejected by fill_rows
        row_index = next(
            (i for i in range(first_row_with[text_length], len(rows)) if free[i] >= text_length), len(rows)
        )
        if row_index == len(rows):
            rows.append([])
            free.append(length)
        rows[row_index].append(text)
        free[row_index] -= text_length
        for size in range(text_length, length + 1):  # no earlier row has that much room
            first_row_with[size] = max(first_row_with[size], row_index)
    return fill_rows(rows, length, pad)


def one_text_per_row(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """Put each text into a row without packing, as requests arrive; for evaluation."""
    return fill_rows([[text] for text in texts], length, pad)


def fill_rows(rows: Sequence[Sequence[Sequence[int]]], length: int, pad: int) -> PackedRows:
    """Put the texts of each list into one row, such as the two answers of a preference pair."""
    for row in rows:
        if (size := sum(map(len, row))) > length:
            size_text = f"a text of {size} tokens is" if len(row) == 1 else f"{len(row)} texts of {size} tokens are"
            raise DataError(f"{size_text} longer than a row of {length}; call cut_texts() first, or make rows longer")
    ids = np.full((len(rows), length), pad, np.int64)
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    for index, row in enumerate(rows):
        start = length - sum(map(len, row))
        for number, text in enumerate(row, start=1):
            columns = slice(start, start := start + len(text))
            ids[index, columns] = text
            segments[index, columns] = number
            positions[index, columns] = np.arange(len(text))
    return PackedRows(ids, segments, positions)


# Attention for which transformers builds masks from positions in every row; flash attention does so for one row.
_SUPPORTED_ATTENTION = ("sdpa", "eager", "flex_attention")


def mask_between_texts(model: nn.Module) -> nn.Module:
    """Limit the attention of a transformers model to each token's text: a text begins where `position_ids` restart.

    The attention mask of a batch is ignored: padding on the left, at position 0, is not visible to any text. Passes
    that continue with a cache are unchanged. The model's class and the names of its weights stay the same.
    """
    names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(functools.partial(_separate_texts, names), with_kwargs=True)
    return model


def _separate_texts(
    names: Sequence[str], model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = dict(zip(names, arguments, strict=False)) | keywords
    mask = inputs.get("attention_mask")
    if inputs.get("past_key_values") is None and (mask is None or mask.ndim == 2):
        _check(model, inputs)
        # With a mask or a cache, transformers treats a row as one text, whatever its positions are.
        inputs |= {"attention_mask": None, "use_cache": False}
    return (), inputs


def _check(model: nn.Module, inputs: dict[str, Any]) -> None:
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _SUPPORTED_ATTENTION:
        raise ConfigError(
            f"attention by {attention!r} does not keep the texts of a row apart; "
            f"build the model with attn_implementation={_SUPPORTED_ATTENTION[0]!r}"
        )
    if inputs.get("position_ids") is None:
        raise DataError("the model gets no position_ids, which mark where each text of a row begins; pass them")
