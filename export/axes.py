"""Axes that differ from request to request: what the task calls them, an example that leaves them free, and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError, StageError
from pipeline.spec.signature import TensorSpec
from pipeline.spec.task import HasAxes, Task

BATCH = "batch"
MASK = "attention_mask"  # as transformers calls it: 1 where there is a token, 0 where there is padding
_MOST_STRETCHED = 4096  # positions; what is longer is not compared at its full length


@dataclass(frozen=True)
class Variant:
    """A batch of a shape that was never traced."""

    rows: int
    sizes: Mapping[str, int]
    padding: str  # which side, or none
    batch: dict[str, Tensor]

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return f"{sizes}, padding: {self.padding}"


def axes_of(task: Task) -> dict[str, tuple[str, ...]]:
    """Names of the axes of every input, the batch first; empty where the batch alone is free."""
    if not isinstance(task, HasAxes):
        return {}
    found = {name: tuple(task.axes.get(name, (BATCH,))) for name in task.inputs}
    if strangers := sorted(set(task.axes) - set(found)):
        raise ConfigError(f"`axes` names {', '.join(strangers)}, which is no input of the task ({', '.join(found)})")
    for name, axes in found.items():
        if axes[:1] != (BATCH,) or not all(axes) or len(set(axes)) != len(axes):
            raise ConfigError(f"`axes` of {name}: write the names of its axes, `batch` first; found {axes}")
    names = {axis for axes in found.values() for axis in axes[1:]}
    if set(task.longest) != names:
        raise ConfigError(
            f"`longest` must say how long each of {', '.join(sorted(names))} may be; found {task.longest}"
        )
    return found


def longest_of(task: Task) -> dict[str, int]:
    return dict(task.longest) if isinstance(task, HasAxes) else {}


def sizes_of(task: Task, batch: Mapping[str, Tensor]) -> dict[str, int]:
    """How long each named axis is in a batch: equal wherever it stands, and never equal to another or below 2.

    The exporter takes equal sizes for one axis, and a size of 1 for an axis that is always 1 long.
    """
    sizes: dict[str, int] = {}
    for name, axes in axes_of(task).items():
        for place, axis in enumerate(axes):
            size = batch[name].shape[place] if place < batch[name].ndim else 0
            if sizes.setdefault(axis, size) != size:
                raise StageError(f"axis `{axis}` is {size} long in `{name}`, and {sizes[axis]} in another input")
            if size < 2:
                raise StageError(f"axis `{axis}` of `{name}` is {size} long in the test data; show one of 2 at least")
    if len(set(sizes.values())) != len(sizes):
        told = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise StageError(f"axes of different names have one size in the test data ({told}); the export needs to differ")
    return sizes


def example(task: Task, samples: Samples) -> dict[str, Tensor]:
    """Samples to trace with: as many as make the batch unlike every other free axis."""
    one = samples.batch([0])
    taken = {one[name].shape[place] for name, axes in axes_of(task).items() for place in range(1, len(axes))}
    rows = next(count for count in range(3, 4 + len(taken)) if count not in taken)
    return samples.batch([index % len(samples) for index in range(rows)])


def variants(task: Task, samples: Samples) -> Iterator[Variant]:
    """Shorter and longer than traced, alone and in company, with padding on either side and with none."""
    traced = sizes_of(task, example(task, samples))
    assert isinstance(task, HasAxes)
    free = [name for name in traced if name != BATCH]
    lengths = {name: _lengths(traced[name], task.longest[name]) for name in free}
    for turn in range(max(len(found) for found in lengths.values())):
        sizes = {name: found[turn % len(found)] for name, found in lengths.items()}
        rows = (1, 2, 5)[turn % 3]
        batch = samples.batch([(turn + index) % len(samples) for index in range(rows)])
        columns = {name: _resized(batch[name], axes, sizes) for name, axes in axes_of(task).items()}
        sides = ("none", "left", "right") if MASK in columns and min(sizes.values()) > 2 else ("none",)
        for side in sides:
            yield Variant(rows, sizes, side, {**batch, **columns, **_padding(columns, side)})


def check_free(specs: tuple[TensorSpec, ...], task: Task) -> None:
    """Every axis the task names is still one in the file."""
    for spec in specs:
        for place, axis in enumerate(axes_of(task).get(spec.name, ())):
            if spec.shape[place] != axis:
                raise StageError(
                    f"axis `{axis}` of `{spec.name}` became {spec.shape[place]} in the export; look in the model for a "
                    "reshape or a comparison that names a length"
                )


def _lengths(traced: int, longest: int) -> list[int]:
    if traced > longest:
        raise StageError(f"the test data have an axis {traced} long, beyond the {longest} that `longest` allows")
    wanted = (min(longest, _MOST_STRETCHED), 1, 2, traced // 2, traced - 1, traced + 1)
    return list(dict.fromkeys(size for size in wanted if 0 < size <= longest and size != traced)) or [traced]


def _resized(column: Tensor, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Tensor:
    """Cut, or repeated from its beginning."""
    for place, axis in enumerate(axes):
        if axis in sizes:
            index = torch.arange(sizes[axis]) % column.shape[place]
            column = column.index_select(place, index)
    return column


def _padding(columns: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
    """A mask with a third of every second row on one side taken for padding."""
    if MASK not in columns:
        return {}
    mask = torch.ones_like(columns[MASK])
    third = mask.shape[1] // 3
    if side == "left":
        mask[::2, :third] = 0
    if side == "right":
        mask[::2, mask.shape[1] - third :] = 0
    return {MASK: mask}
