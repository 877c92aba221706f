"""Where a weight's numbers come from, as a tree of tensors in files of which only the wanted box is read.

What a safetensors file says it holds, and whether all of it is there; nothing of the weights is read.
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

from pipeline.contract.errors import DataError

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own reader
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    name: str
    dtype: str  # in the words of safetensors
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a file that is whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise DataError(f"{path}: no safetensors file: {size} bytes, and its first 8 tell of no header")
        header = file.read(length)
    if len(header) < length:
        raise DataError(f"{path}: truncated: its header has {length} bytes, the file {size}; fetch it again")
    entries, data = _entries(path, header)
    if size != (expected := _LENGTH_BYTES + length + data):
        what = "truncated" if size < expected else "longer than it says"
        raise DataError(f"{path}: {what}: {expected} bytes expected by its header, {size} found; fetch it again")
    return entries


def _entries(path: Path, header: bytes) -> tuple[dict[str, Entry], int]:
    """By name, and the bytes of all of them."""
    found: dict[str, Entry] = {}
    end = 0
    try:
        for name, what in json.loads(header).items():
            if name != "__metadata__":
                found[name] = Entry(path, name, str(what["dtype"]), tuple(int(size) for size in what["shape"]))
                start, stop = what["data_offsets"]
                _check(found[name], int(stop) - int(start))
                end = max(end, int(stop))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: no safetensors file: its header does not read ({error!r})") from error
    return found, end


def _check(entry: Entry, room: int) -> None:
    if entry.dtype not in BITS:
        raise DataError(f"{entry.file}: {entry.name} is of type {entry.dtype}; known ones: {', '.join(BITS)}")
    if room != entry.bytes:
        raise DataError(
            f"{entry.file}: {entry.name} of {entry.dtype} {list(entry.shape)} needs {entry.bytes} bytes, "
            f"its place has {room}"
        )


Box = tuple[tuple[int, int], ...]  # of each axis where it starts and stops
Read = Callable[[Entry, Box], Tensor]


class Source(Protocol):
    """The leaves of a tree are looked at by those who check types and tell people of files."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def leaves(self) -> Sequence[Entry]: ...

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        """Write the box of the weight into `out`, in its type; the most that is held beside is a leaf's part of it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor as it stands in a file."""

    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def leaves(self) -> Sequence[Entry]:
        return (self.entry,)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        if out.numel():
            _put(read(self.entry, box), out, self.entry)


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape along a new first axis, as experts are that a file holds one by one."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @cached_property
    def leaves(self) -> Sequence[Entry]:
        return [leaf for part in self.parts for leaf in part.leaves]

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        start, stop = box[0]
        for place, part in enumerate(self.parts[start:stop]):
            part.fill(box[1:], out[place], read)


@dataclass(frozen=True)
class Join:
    """Tensors one after the other along an axis there is."""

    parts: tuple[Source, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        whole = list(self.parts[0].shape)
        whole[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(whole)

    @cached_property
    def leaves(self) -> Sequence[Entry]:
        return [leaf for part in self.parts for leaf in part.leaves]

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        start, stop = box[self.axis]
        begin = 0
        for part in self.parts:
            end = begin + part.shape[self.axis]
            first, last = max(start, begin), min(stop, end)
            if first < last:
                inner = (*box[: self.axis], (first - begin, last - begin), *box[self.axis + 1 :])
                part.fill(inner, out.narrow(self.axis, first - start, last - first), read)
            begin = end


@dataclass(frozen=True)
class Scaled:
    """Eight-bit numbers, each block of which has a scale: a matrix as official FP8 checkpoints have it."""

    weight: Entry
    scale: Entry
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def leaves(self) -> Sequence[Entry]:
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
        _put(numbers.mul_(scale[rows][:, columns]), out, self.weight)


@dataclass(frozen=True)
class Same:
    """One weight of the model that files hold several times, as tied embeddings: all must be equal."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @cached_property
    def leaves(self) -> Sequence[Entry]:
        return [leaf for part in self.parts for leaf in part.leaves]

    def fill(self, box: Box, out: Tensor, read: Read) -> None:
        self.parts[0].fill(box, out, read)
        for part in self.parts[1:]:
            other = torch.empty_like(out)
            part.fill(box, other, read)
            if not torch.equal(out, other):
                one, two = self.parts[0].leaves[0], part.leaves[0]
                raise DataError(
                    f"{two.file}: {two.name} differs from {one.name}, and the model has one weight for both "
                    "(tie_word_embeddings); say false there, or mend the file"
                )


@dataclass(frozen=True)
class Held:
    """A weight no file has, as the task's own code has begun it."""

    tensor: Tensor
    leaves: Sequence[Entry] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def fill(self, box: Box, out: Tensor, read: Read) -> None:  # noqa: ARG002
        out.copy_(self.tensor[tuple(slice(*side) for side in box)])


@dataclass(frozen=True)
class Wave:
    """Small numbers that depend on their place alone: for weights that a checkpoint is about to overwrite."""

    shape: tuple[int, ...]
    leaves: Sequence[Entry] = ()

    def fill(self, box: Box, out: Tensor, read: Read) -> None:  # noqa: ARG002
        places = torch.ones(out.shape, dtype=torch.float32)
        for axis, (start, stop) in enumerate(box):
            side = [1] * len(box)
            side[axis] = stop - start
            places += torch.arange(start, stop, dtype=torch.float32).mul(1.7 + axis).view(side)
        out.copy_(places.sin_().mul_(0.02))


def _put(found: Tensor, out: Tensor, entry: Entry) -> None:
    out.copy_(found)
    narrower = out.is_floating_point() and torch.finfo(out.dtype).max < torch.finfo(found.dtype).max
    if narrower and not bool(torch.isfinite(out).all()):
        kind = str(out.dtype).removeprefix("torch.")
        raise DataError(
            f"{entry.file}: {entry.name} has numbers that {kind} cannot hold; build the model in bfloat16 or float32"
        )
