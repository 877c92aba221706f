"""What a safetensors file says it holds, and whether all of it is there; nothing of the weights is read."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from pipeline.spec.errors import DataError

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
