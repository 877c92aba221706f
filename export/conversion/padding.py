"""Whether padding changes answers: each test sample by itself, and beside longer samples that it is padded for.

The task's collate() pads, or the columns of the data are padded already. Then the padding is found in the data: where
all inputs have, at the same end, values that are nowhere else. Where that is not clear, the result states it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from export.tolerance import allowed_error, is_within, measure_scale
from pipeline.contract.codec import Array
from pipeline.contract.data import Samples, exceeded_limit, open_split
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import HasCollate, Task, input_axes

Outputs = Callable[[Mapping[str, Tensor]], Mapping[str, Array]]  # of torch, by name
Side = Literal["left", "right"]

MASK = "attention_mask"  # as transformers calls it: 1 where there is a token, 0 where there is padding
_MAX_SAMPLES = 2048
_MAX_BYTES = 1 << 28  # of the inputs that are compared
_ROWS = 64  # samples of one length that run together
_LARGEST = float(np.finfo(np.float64).max)  # stands for infinity, which JSON does not have
_CANDIDATES = 8  # values at the end of samples that may be padding, the most frequent first


@dataclass(frozen=True)
class PaddingEffect:
    """The differences between samples by themselves and padded, for parity.json."""

    padding: Mapping[str, str] = field(default_factory=dict)  # how the data are padded, by axis
    unknown: Mapping[str, str] = field(default_factory=dict)  # axes for which that is not clear, and why
    samples: int = 0  # padded ones that were compared
    differing: int = 0  # samples
    max_abs_error: float = 0.0
    worst: str = ""

    @property
    def text(self) -> str:
        """Return how padding changes answers, or why that is unknown; empty if it does not."""
        axes: dict[str, list[str]] = {}
        for axis, why in self.unknown.items():
            axes.setdefault(why, []).append(f"`{axis}`")
        sentences = [f"whether padding of {' and '.join(names)} changes answers is unknown: {why}" for why, names in axes.items()]  # fmt: skip  # noqa: E501
        if self.differing:
            sentences.insert(
                0,
                f"padding changes answers: {self.differing} of {self.samples} padded test samples have other outputs "
                f"by themselves, by up to {self.max_abs_error:.2g} in {self.worst}",
            )
        return "; ".join(sentences)


@dataclass(frozen=True)
class Padding:
    """The padding of one axis in the data."""

    side: Side
    values: Mapping[str, Any]  # of the inputs that show it
    lengths: np.ndarray[Any, np.dtype[np.int64]]  # of every sample without padding

    @property
    def text(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{values} on the {self.side}"


def measure_padding(
    task: Task, compute: Outputs, samples: Samples, axes: Mapping[str, Sequence[int | str]], config: Export
) -> PaddingEffect:
    """Compare torch's outputs for test samples by themselves and padded; `axes` are those of each output."""
    if not any(_dynamic(axes_of_input) for axes_of_input in input_axes(task).values()):
        return PaddingEffect()
    unknown: dict[str, str] = {}
    if isinstance(task, HasCollate):
        text, sides, pairs = _collated_pairs(task, samples, unknown)
    else:
        text, sides, pairs = _trimmed_pairs(task, samples, unknown)
    count, differing, largest, worst = 0, 0, 0.0, ""
    failures: list[str] = []  # of samples that torch cannot compute by themselves
    for indices, single, padded in pairs:
        try:
            expected, actual = (compute(batch) for batch in (single, padded))
        except (RuntimeError, IndexError, ValueError) as failure:  # such as a window that is longer than the sample
            failures += [f"{type(failure).__name__}: {' '.join(str(failure).split())[:160]}"] * len(indices)
            continue
        differs = np.zeros(len(indices), dtype=bool)
        for name, own in expected.items():
            part = _cut(actual[name], own.shape, axes.get(name, ()), sides)
            if part is None:
                shapes = f"{list(own.shape[1:])} for a sample by itself, {list(actual[name].shape[1:])} if padded"
                return PaddingEffect(text, dict.fromkeys(text, f"`{name}` is {shapes}"))
            allowed = allowed_error(own, config, measure_scale(actual[name]))
            far = ~(is_within(part, own, allowed) | ((own != own) & (part != part)))  # NaN is equal to NaN here
            differs |= far.reshape(len(far), -1).any(axis=1)
            error = np.where(far, np.abs(own.astype(np.float64) - part.astype(np.float64)), 0.0)
            error = np.nan_to_num(error, nan=_LARGEST, posinf=_LARGEST)
            of_row = error.reshape(len(error), -1).max(axis=1, initial=0.0)
            if of_row.max() > largest:
                largest, worst = float(of_row.max()), f"`{name}` of test sample {indices[int(of_row.argmax())]}"
        count, differing = count + len(indices), differing + int(differs.sum())
    if failures:
        why = f"torch cannot compute {len(failures)} of {count + len(failures)} padded test samples by themselves"
        unknown |= dict.fromkeys(text, f"{why} ({failures[0]})")
    elif text and not count:
        unknown |= dict.fromkeys(text, "no padded test sample has a length of its own")
    return PaddingEffect(text, unknown, count, differing, largest, worst)


Pairs = Iterator[tuple[Sequence[int], Mapping[str, Tensor], Mapping[str, Tensor]]]


def _dynamic(axes: Sequence[int | str]) -> dict[int, str]:
    """Return the named axes besides the batch, by position."""
    return {position: axis for position, axis in enumerate(axes) if position and isinstance(axis, str)}


def _cut(array: Array, shape: Sequence[int], axes: Sequence[int | str], sides: Mapping[str, Side]) -> Array | None:
    """Return the part of a padded sample's output that it also has by itself; None if that is longer."""
    for position, size in enumerate(shape):
        if size > array.shape[position]:
            return None
        name = str(axes[position]) if position < len(axes) else ""
        side = next((side for axis, side in sides.items() if axis in name or len(set(sides.values())) == 1), "right")
        start = array.shape[position] - size if side == "left" else 0
        array = array.take(range(start, start + size), axis=position)
    return array


def _trimmed_pairs(
    task: Task, samples: Samples, unknown: dict[str, str]
) -> tuple[dict[str, str], dict[str, Side], Pairs]:
    """Cut the padding from columns that are padded: samples of one length run together, without any."""
    columns = _first_columns(task, samples)
    found: dict[str, Padding] = {}
    for axis in dict.fromkeys(axis for axes in input_axes(task).values() for axis in _dynamic(axes).values()):
        padding = find_padding(task, columns, axis)
        if isinstance(padding, Padding):
            found[axis] = padding
        elif padding:
            unknown[axis] = padding
    text = {axis: padding.text for axis, padding in found.items()}
    sides = {axis: padding.side for axis, padding in found.items()}
    return text, sides, _cut_samples(task, columns, found)


def _first_columns(task: Task, samples: Samples) -> dict[str, Tensor]:
    row_bytes = sum(column.numel() * column.element_size() for column in samples.batch([0]).values())
    count = max(2, min(len(samples), _MAX_SAMPLES, _MAX_BYTES // max(row_bytes, 1)))
    batch = samples.batch(range(min(count, len(samples))))
    return {name: batch[name] for name in task.inputs}


def _cut_samples(task: Task, columns: Mapping[str, Tensor], found: Mapping[str, Padding]) -> Pairs:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, lengths in enumerate(zip(*(padding.lengths.tolist() for padding in found.values()), strict=True)):
        groups[lengths].append(index)
    for lengths, indices in groups.items():
        sizes = dict(zip(found, lengths, strict=True))
        padded = {name: column[indices] for name, column in columns.items()}
        single = {name: _trim(padded[name], axes, sizes, found, name) for name, axes in input_axes(task).items()}
        if exceeded_limit(task, single) or all(single[name].shape == padded[name].shape for name in single):
            continue
        for start in range(0, len(indices), _ROWS):
            rows = slice(start, start + _ROWS)
            own, filled = ({name: column[rows] for name, column in side.items()} for side in (single, padded))
            yield indices[rows], own, filled


def _trim(
    column: Tensor, axes: Sequence[int | str], sizes: Mapping[str, int], found: Mapping[str, Padding], name: str
) -> Tensor:
    for position, axis in _dynamic(axes).items():
        if axis in sizes:
            is_left = found[axis].side == "left" and (name in found[axis].values or _varies(column))
            start = column.shape[position] - sizes[axis] if is_left else 0
            column = column.narrow(position, start, sizes[axis])
    return column


def _varies(column: Tensor) -> bool:
    """Return whether samples differ in a column; positions that are counted do not."""
    return bool((column != column[:1]).any())


def find_padding(task: Task, columns: Mapping[str, Tensor], axis: str) -> Padding | str:
    """Return how the data pad an axis, or why that is not clear; an empty text if they do not pad it."""
    arrays = {}
    for name, axes in input_axes(task).items():
        for position, other in _dynamic(axes).items():
            array = columns[name].numpy()
            if other == axis and _varies(columns[name]):
                arrays[name] = np.moveaxis(array, position, 1).reshape(len(array), array.shape[position], -1)
    if not arrays:
        return "the inputs are equal in all test samples"
    sides: tuple[Side, Side] = ("right", "left")
    if not any(_may_be_padded(array) for array in arrays.values()):
        return ""
    masks = [name for name, array in arrays.items() if array.shape[2] == 1 and set(np.unique(array).tolist()) == {0, 1}]
    for names in (tuple(arrays), *((name,) for name in masks)):
        for side in sides:
            padding = _padding_at_end({name: arrays[name] for name in names}, side)
            if padding is not None and (len(names) == len(arrays) or _is_mask(names[0], padding, arrays)):
                return padding
    return "the test samples show none: in no sample do all inputs end with values that are nowhere else"


def _may_be_padded(array: Array) -> bool:
    """Return whether a sample has two equal positions at one of its ends, or two samples end alike.

    Photographs and measured curves have not: each ends with values of its own.
    """
    for last, other in ((-1, -2), (0, 1)):
        ends = np.nan_to_num(array[:, [last, other if array.shape[1] > 1 else last]])
        if (ends[:, 0] == ends[:, 1]).all(axis=1).any() or len(np.unique(ends[:, 0], axis=0)) < len(ends):
            return True
    return False


def _padding_at_end(arrays: Mapping[str, Array], side: Side) -> Padding | None:
    """Return the padding at one end: equal values at the end of samples of several lengths, and nowhere else."""
    ordered = {name: array[:, ::-1] if side == "left" else array for name, array in arrays.items()}
    ends = [array[:, -1] for array in ordered.values()]
    is_uniform = np.logical_and.reduce([(end == end[:, :1]).all(axis=1) for end in ends])
    counts = Counter(zip(*(end[is_uniform, 0].tolist() for end in ends), strict=True))
    for values, _ in counts.most_common(_CANDIDATES):
        pairs = zip(ordered.values(), values, strict=True)
        is_padding = np.logical_and.reduce([(array == value).all(axis=2) for array, value in pairs])
        length = is_padding.shape[1]
        runs = np.where(is_padding.all(axis=1), length, (~is_padding[:, ::-1]).argmax(axis=1))
        if len(set(runs.tolist())) > 1 and runs.max() > 1 and (is_padding.sum(axis=1) == runs).all():
            return Padding(side, dict(zip(arrays, values, strict=True)), length - runs)
    return None


def _is_mask(name: str, padding: Padding, arrays: Mapping[str, Array]) -> bool:
    """Return whether zeros at the end of an input mean padding: by its name, or as another input is constant there."""
    if padding.values[name] != 0:
        return False
    position = np.arange(arrays[name].shape[1])
    if padding.side == "left":
        position = position[::-1]
    is_padding = position >= padding.lengths[:, None]
    others = [array[is_padding] for other, array in arrays.items() if other != name]
    return name == MASK or any((other == other[:1, :1]).all() for other in others)


def _collated_pairs(
    task: Task, samples: Samples, unknown: dict[str, str]
) -> tuple[dict[str, str], dict[str, Side], Pairs]:
    """Compare what collate() returns for a sample by itself with its row in the batch of all."""
    source = open_split(task, samples.split)
    count = len(_first_columns(task, samples)[task.inputs[0]])
    axes_by_input = input_axes(task)
    text: dict[str, str] = {}
    sides: dict[str, Side] = {}
    pairs = []
    for index in range(count):
        single, padded = source.batch([index]), samples.batch([index])
        for name, axes in axes_by_input.items():
            for position, axis in _dynamic(axes).items():
                if (side := _side(single[name], padded[name], position)) is not None:
                    text[axis], sides[axis] = f"collate() on the {side}", side
        if not exceeded_limit(task, single) and any(single[name].shape != padded[name].shape for name in task.inputs):
            pairs.append(([index], single, padded))
    for axis in {axis for axes in axes_by_input.values() for axis in _dynamic(axes).values()} - text.keys():
        unknown[axis] = "all test samples have one length, or collate() changes more than their ends"
    return text, sides, iter(pairs)


def sample_lengths(task: Task, samples: Samples) -> dict[str, set[int]]:
    """Return the lengths of the first samples along each named axis, without padding."""
    columns, lengths = _first_columns(task, samples), defaultdict[str, set[int]](set)
    source = open_split(task, samples.split) if isinstance(task, HasCollate) else None
    for name, axes in input_axes(task).items():
        for position, axis in _dynamic(axes).items():
            lengths[axis].add(columns[name].shape[position])
            if source is not None:
                lengths[axis].update(source.batch([index])[name].shape[position] for index in range(len(columns[name])))
            elif isinstance(padding := find_padding(task, columns, axis), Padding):
                lengths[axis].update(padding.lengths.tolist())
    return lengths


def _side(single: Tensor, padded: Tensor, position: int) -> Side | None:
    """Return the side on which a sample was padded; None if it was not, or if both sides fit."""
    size, length = single.shape[position], padded.shape[position]
    if size >= length:
        return None
    sides: dict[Side, int] = {"right": 0, "left": length - size}
    fitting: list[Side] = []
    for side, start in sides.items():
        part = padded
        for place, wanted in enumerate(single.shape):
            if place == position:
                part = part.narrow(place, start, size)
            elif wanted < part.shape[place]:
                return None  # padded along two axes, where other samples show the sides
        if torch.equal(part, single):
            fitting.append(side)
    return fitting[0] if len(fitting) == 1 else None
