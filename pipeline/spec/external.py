"""Which files an ONNX file keeps its tensors in, read off its bytes: the service has no library that could tell."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from pipeline.spec.errors import BundleError

# ONNX's messages on the way to a tensor: field number → what stands there.
MESSAGES: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto", 22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {13: "StringStringEntryProto"},
}  # fmt: skip

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_SPARE = {_EIGHT: 8, _FOUR: 4}
_LOCATION = b"location"

Span: TypeAlias = tuple[int, int]


def external_locations(path: Path) -> set[str]:
    """As they are written there, whatever they lead to."""
    if not path.stat().st_size:
        return set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        if raw.find(_LOCATION) < 0:  # the word stands before each
            return set()
        try:
            return set(_locations(raw))
        except (IndexError, UnicodeDecodeError) as error:
            raise BundleError(f"{path}: is not an ONNX file that can be read") from error


def check_inside(path: Path) -> None:
    """Weights kept outside the file are plain files beside it, named without any path."""
    for location in sorted(external_locations(path)):
        target = path.parent / location
        if not location or Path(location).name != location or target.is_symlink() or not target.is_file():
            raise BundleError(
                f"{path}: keeps weights in {location!r}, which is no plain file beside it; a bundle holds all it needs"
            )


def _locations(raw: mmap.mmap) -> Iterator[str]:
    """Without recursion: a file made in bad faith nests as deep as it likes."""
    waiting: list[tuple[str, Span]] = [("ModelProto", (0, len(raw)))]
    while waiting:
        kind, span = waiting.pop()
        if kind == "StringStringEntryProto":
            entry = {number: raw[slice(*inner)] for number, inner in _fields(raw, span)}
            if entry.get(1) == _LOCATION:
                yield entry.get(2, b"").decode()
            continue
        inside = MESSAGES[kind]
        waiting += [(inside[number], inner) for number, inner in _fields(raw, span) if number in inside]


def _fields(raw: mmap.mmap, span: Span) -> Iterator[tuple[int, Span]]:
    """Number and content of each field that has a length; the others are passed over."""
    at, end = span
    while at < end:
        tag, at = _varint(raw, at)
        kind = tag & 7
        if kind == _BYTES:
            size, at = _varint(raw, at)
            if at + size > end:
                raise IndexError(at)
            yield tag >> 3, (at, at + size)
            at += size
        elif kind == _VARINT:
            _, at = _varint(raw, at)
        elif kind in _SPARE:
            at += _SPARE[kind]
        else:
            raise IndexError(at)
    if at != end:
        raise IndexError(at)


def _varint(raw: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError(at)
