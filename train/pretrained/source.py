"""Sources of weights: tensors in safetensors files, and the ways to combine them.

A source fills a box of a weight, and reads only what the box needs. `read_header` lists the tensors of a file and
checks that the file is complete, without reading any weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pipeline.system.errors import DataError
from train.checkpoint.format import DTYPES, LENGTH_BYTES

_MAX_HEADER_BYTES = 100_000_000  # as in the format's own reader


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_header(path: Path) -> dict[str, Entry]:
    """Return every tensor of a file; raises an error if the file is not complete."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            raise DataError(f"{path}: no safetensors file: {size} bytes, and no valid header length in the first 8")
        header = file.read(length)
    if len(header) < length:
        raise DataError(f"{path}: truncated: its header has {length} bytes, the file {size}; fetch it again")
    entries, data = _entries(path, header)
    if size != (expected := LENGTH_BYTES + length + data):
        problem = "truncated" if size < expected else "too long"
        raise DataError(f"{path}: {problem}: {expected} bytes expected by its header, {size} found; fetch it again")
    return entries


def _entries(path: Path, header: bytes) -> tuple[dict[str, Entry], int]:
    """Return the tensors by name, and the bytes of all of them."""
    entries: dict[str, Entry] = {}
    end = 0
    try:
        for name, record in json.loads(header).items():
            if name != "__metadata__":
                entries[name] = Entry(path, name, str(record["dtype"]), tuple(int(size) for size in record["shape"]))
                start, stop = record["data_offsets"]
                _check(entries[name], int(stop) - int(start))
                end = max(end, int(stop))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: no safetensors file: its header cannot be read ({error!r})") from error
    return entries, end


def _check(entry: Entry, size: int) -> None:
    if entry.dtype not in DTYPES:
        raise DataError(f"{entry.file}: {entry.name} is of type {entry.dtype}; supported types: {', '.join(DTYPES)}")
    if size != entry.bytes:
        raise DataError(
            f"{entry.file}: {entry.name} of {entry.dtype} {list(entry.shape)} needs {entry.bytes} bytes, but has {size}"
        )


Box = tuple[tuple[int, int], ...]  # start and stop on each axis
Read = Callable[[Entry, Box], Tensor]


class Source(Protocol):
    """Where the values of a weight come from; `entries` are the tensors that it reads."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def entries(self) -> Sequence[Entry]: ...

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        """Write a box of the weight into `out`, in its type; needs memory for the box of one entry besides."""


@dataclass(frozen=True)
class Whole:
    """A tensor of a file, unchanged."""

    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def entries(self) -> Sequence[Entry]:
        return (self.entry,)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        if out.numel():
            _copy(read(self.entry, box), out, self.entry)


@dataclass(frozen=True)
class Rows:
    """One of `count` equal parts of a tensor's rows, such as the queries of one that has the keys and values, too."""

    whole: Source
    index: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *row = self.whole.shape
        return (min(self._size, rows - self.index * self._size), *row)

    @property
    def _size(self) -> int:
        return -(-self.whole.shape[0] // self.count)

    @property
    def entries(self) -> Sequence[Entry]:
        return self.whole.entries

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        (start, stop), first = box[0], self.index * self._size
        self.whole.fill(((first + start, first + stop), *box[1:]), out, read)


@dataclass(frozen=True)
class _Combined:
    parts: tuple[Source, ...]

    @cached_property
    def entries(self) -> Sequence[Entry]:
        return [entry for part in self.parts for entry in part.entries]


@dataclass(frozen=True)
class Stacked(_Combined):
    """Tensors of one shape along a new first axis, such as experts that files have one by one."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        start, stop = box[0]
        for index, part in enumerate(self.parts[start:stop]):
            part.fill(box[1:], out[index], read)


@dataclass(frozen=True)
class Concatenated(_Combined):
    """Tensors one after the other along an existing axis."""

    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        start, stop = box[self.axis]
        part_start = 0
        for part in self.parts:
            part_stop = part_start + part.shape[self.axis]
            overlap_start, overlap_stop = max(start, part_start), min(stop, part_stop)
            if overlap_start < overlap_stop:
                part_box = (
                    *box[: self.axis],
                    (overlap_start - part_start, overlap_stop - part_start),
                    *box[self.axis + 1 :],
                )
                part.fill(part_box, out.narrow(self.axis, overlap_start - start, overlap_stop - overlap_start), read)
            part_start = part_stop


@dataclass(frozen=True)
class Dequantized:
    """A matrix of eight-bit numbers with a scale for each block, as in official FP8 checkpoints."""

    weight: Entry
    scale: Entry
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def entries(self) -> Sequence[Entry]:
        return (self.weight, self.scale)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        if not out.numel():
            return
        blocks = tuple((start // size, -(-stop // size)) for (start, stop), size in zip(box, self.block, strict=True))
        scale = read(self.scale, blocks).float()
        rows, columns = (
            torch.arange(start, stop) // size - start // size
            for (start, stop), size in zip(box, self.block, strict=True)
        )
        numbers = read(self.weight, box).float()
        _copy(numbers.mul_(scale[rows][:, columns]), out, self.weight)


@dataclass(frozen=True)
class Duplicates(_Combined):
    """One weight of the model that files have several times, such as tied embeddings; all must be equal."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        self.parts[0].fill(box, out, read)
        for part in self.parts[1:]:
            other_values = torch.empty_like(out)
            part.fill(box, other_values, read)
            if not torch.equal(out, other_values):
                first_entry, other_entry = self.parts[0].entries[0], part.entries[0]
                raise DataError(
                    f"{other_entry.file}: {other_entry.name} differs from {first_entry.name}, but the model "
                    "has one weight for both; to fix it: set tie_word_embeddings to false in config.json, or fix "
                    "the file"
                )


@dataclass(frozen=True)
class RowNorms:
    """The norm of each row of a matrix, with which DoRA's magnitudes begin."""

    matrix: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape[:1]

    @property
    def entries(self) -> Sequence[Entry]:
        return self.matrix.entries

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        width = self.matrix.shape[1]
        rows = torch.empty((len(out), width), dtype=out.dtype, device=out.device)
        self.matrix.fill((box[0], (0, width)), rows, read)
        out.copy_(torch.linalg.norm(rows, dim=1))


@dataclass(frozen=True)
class Initialized:
    """A weight that no file has, as the task initialized it."""

    tensor: Tensor
    entries: Sequence[Entry] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:  # noqa: ARG002
        out.copy_(self.tensor[tuple(slice(*side) for side in box)])


@dataclass(frozen=True)
class Placeholder:
    """Small numbers that depend on the position alone: for weights that a checkpoint is about to overwrite."""

    shape: tuple[int, ...]
    entries: Sequence[Entry] = ()

    def fill(self, box: Box, out: Tensor, read: Read) -> None:  # noqa: ARG002
        angles = torch.ones(out.shape, dtype=torch.float32)
        for axis, (start, stop) in enumerate(box):
            shape = [1] * len(box)
            shape[axis] = stop - start
            angles += torch.arange(start, stop, dtype=torch.float32).mul(1.7 + axis).view(shape)
        out.copy_(angles.sin_().mul_(0.02))


def _copy(values: Tensor, out: Tensor, entry: Entry) -> None:
    out.copy_(values)
    narrower = out.is_floating_point() and torch.finfo(out.dtype).max < torch.finfo(values.dtype).max
    if narrower and not bool(torch.isfinite(out).all()):
        dtype = str(out.dtype).removeprefix("torch.")
        raise DataError(
            f"{entry.file}: {entry.name} has numbers that are too large for {dtype}; "
            "to fix it: build the model in bfloat16 or float32"
        )
