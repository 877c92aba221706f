"""Shapes that were not traced: batches of other sizes, lengths and paddings, and torch's outputs for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.conversion.names import MeasuredShapes
from export.conversion.padding import MASK, Padding, find_padding, sample_lengths
from pipeline.contract.data import Samples, axis_sizes, example_batch, forward, name_outputs, named_sizes
from pipeline.contract.signature import TensorSpec
from pipeline.contract.task import BATCH, HasAxes, Task, input_axes, max_axis_sizes, shortest_sizes
from pipeline.system.errors import StageError

_MAX_SEARCHED = 256  # samples that show how the data are padded
_EVERY_LENGTH = 64  # up to here, all lengths are compared
_MAX_COMPARED_LENGTH = 4096  # positions; longer axes are not compared at their full length
MODEL_ERRORS = (RuntimeError, IndexError, ValueError)  # such as a window that is longer than the text


def named_axes(axes: Sequence[int | str]) -> dict[int, str]:
    return {position: axis for position, axis in enumerate(axes) if isinstance(axis, str)}


@dataclass(frozen=True)
class UntracedBatch:
    """A batch whose shape differs from the traced one."""

    rows: int
    sizes: Mapping[str, int]
    padding: str  # "left", "right", "none", or both sides of different axes
    batch: dict[str, Tensor]

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{sizes}, padding: {self.padding}"

    @property
    def token_mask(self) -> Any:
        """Return an array of which positions are no padding; None without an attention mask."""
        return self.batch[MASK].numpy() == 1 if MASK in self.batch else None


def untraced_batches(task: Task, samples: Samples) -> Iterator[UntracedBatch]:
    """Yield batches of other lengths and sizes than traced, with padding on the left, on the right, and without."""
    traced = axis_sizes(task, example_batch(task, samples))
    assert isinstance(task, HasAxes)
    shortest = shortest_sizes(task)
    lengths = {axis: _untraced_lengths(traced[axis], shortest[axis], task.longest[axis]) for axis in shortest}
    first = samples.batch(range(min(_MAX_SEARCHED, len(samples))))
    found = {axis: find_padding(task, {name: first[name] for name in task.inputs}, axis) for axis in lengths}
    paddings = {axis: padding for axis, padding in found.items() if isinstance(padding, Padding)}
    for index in range(max(len(sizes_of_axis) for sizes_of_axis in lengths.values())):
        sizes = {name: sizes_of_axis[index % len(sizes_of_axis)] for name, sizes_of_axis in lengths.items()}
        rows = (1, 2, 5)[index % 3]
        batch = samples.batch([(index + row) % len(samples) for row in range(rows)])
        columns = {name: _resize(batch[name], axes, sizes) for name, axes in input_axes(task).items()}
        yield UntracedBatch(rows, sizes, "none", {**batch, **columns, **_padding_mask(columns, "none")})
        if min(sizes.values()) <= 2:
            continue
        if MASK in columns:
            for side in ("left", "right"):
                yield UntracedBatch(rows, sizes, side, {**batch, **columns, **_padding_mask(columns, side)})
        elif paddings:
            sides = " and ".join(dict.fromkeys(padding.side for padding in paddings.values()))
            yield UntracedBatch(rows, sizes, sides, {**batch, **_padded(columns, input_axes(task), paddings)})


def every_length(task: Task, samples: Samples) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield single samples of every length up to 64, and of those that the data have."""
    own, shortest = sample_lengths(task, samples), shortest_sizes(task)
    sizes_by_axis = {}
    for axis, longest in max_axis_sizes(task).items():
        wanted = dict.fromkeys((*range(1, _EVERY_LENGTH + 1), *sorted(own[axis])))
        sizes_by_axis[axis] = [size for size in wanted if shortest[axis] <= size <= longest]
    for index in range(max(map(len, sizes_by_axis.values()))):
        sizes = {axis: sizes_of_axis[index % len(sizes_of_axis)] for axis, sizes_of_axis in sizes_by_axis.items()}
        batch = samples.batch([index % len(samples)])
        columns = {name: _resize(batch[name], axes, sizes) for name, axes in input_axes(task).items()}
        text = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        yield f"batch 1, {text}", {**batch, **columns, **_padding_mask(columns, "none")}


@torch.no_grad()
def run_model(task: Task, model: nn.Module, batch: Mapping[str, Tensor], samples: Samples) -> tuple[Any, Any]:
    """Return a batch that the model accepts, and its outputs: integers may index an axis that was cut."""
    try:
        return batch, forward(model, task, batch)
    except MODEL_ERRORS:
        first = samples.batch(range(min(_MAX_SEARCHED, len(samples))))
        kinds = {name: first[name] for name in task.inputs if not first[name].dtype.is_floating_point}
        indices = [name for name, column in kinds.items() if column.numel() and column.max() > 1]  # others are masks
        sizes = {size for axis, size in named_sizes(task, batch).items() if axis != BATCH and indices}
        for size in sorted(sizes, reverse=True):
            wrapped = {name: torch.where(batch[name] < size, batch[name], batch[name] % size) for name in indices}
            with suppress(*MODEL_ERRORS):
                return {**batch, **wrapped}, forward(model, task, {**batch, **wrapped})
        raise


def measure_shapes(task: Task, model: nn.Module, samples: Samples) -> list[MeasuredShapes]:
    """Return the shapes of torch's outputs as traced and at other sizes, where torch can compute them.

    The comparison with torch reports outputs that lose an axis of size 1.
    """
    traced = example_batch(task, samples)
    batches: list[Mapping[str, Tensor]] = [traced, {name: column[:1] for name, column in traced.items()}]
    if isinstance(task, HasAxes):
        batches += [untraced.batch for untraced in untraced_batches(task, samples) if untraced.padding == "none"]
    measured = []
    for batch in batches:
        sizes = {BATCH: len(batch[task.inputs[0]]), **named_sizes(task, batch)}
        with suppress(*MODEL_ERRORS):
            outputs = name_outputs(task, run_model(task, model, batch, samples)[1])
            measured.append(MeasuredShapes(sizes, {name: tuple(value.shape) for name, value in outputs.items()}))
    axes = [[len(shape) for shape in shapes.outputs.values()] for shapes in measured]
    return [shapes for shapes, counts in zip(measured, axes, strict=True) if counts == axes[0]]


def check_dynamic_axes(specs: tuple[TensorSpec, ...], task: Task) -> None:
    """Check that every axis that the task names is dynamic in the file."""
    for spec in specs:
        for position, axis in enumerate(input_axes(task).get(spec.name, ())):
            if spec.shape[position] != axis:
                raise StageError(
                    f"axis `{axis}` of `{spec.name}` became {spec.shape[position]} in the export; look for a "
                    "reshape or a comparison in the model that names a length"
                )


def _untraced_lengths(traced: int, shortest: int, longest: int) -> list[int]:
    most = min(longest, max(shortest, _MAX_COMPARED_LENGTH))
    candidates = (most, shortest, shortest + 1, traced // 2, traced - 1, traced + 1)
    sizes = (size for size in candidates if shortest <= size <= longest and size != traced)
    return list(dict.fromkeys(sizes)) or [traced]


def _resize(column: Tensor, axes: Sequence[int | str], sizes: Mapping[str, int]) -> Tensor:
    """Return the column cut, or repeated from its beginning, to the sizes."""
    for position, axis in named_axes(axes).items():
        if axis in sizes:
            index = torch.arange(sizes[axis]) % column.shape[position]
            column = column.index_select(position, index)
    return column


def _padded(
    columns: Mapping[str, Tensor], axes_by_input: Mapping[str, Sequence[int | str]], paddings: Mapping[str, Padding]
) -> dict[str, Tensor]:
    """Return columns in which a third of every second row is padded as the data are."""
    padded = {name: column.clone() for name, column in columns.items()}
    for axis, padding in paddings.items():
        for name, value in padding.values.items():
            position = axes_by_input[name].index(axis)
            size = padded[name].shape[position]
            start = 0 if padding.side == "left" else size - size // 3
            padded[name][::2].narrow(position, start, size // 3).fill_(value)
    return padded


def _padding_mask(columns: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    """Return a mask in which a third of every second row, on one side, is padding."""
    if MASK not in columns:
        return {}
    mask = torch.ones_like(columns[MASK])
    third = mask.shape[1] // 3
    if side == "left":
        mask[::2, :third] = 0
    if side == "right":
        mask[::2, mask.shape[1] - third :] = 0
    return {MASK: mask}
