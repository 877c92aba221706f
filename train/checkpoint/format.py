"""The file that one process writes: a safetensors file, whose entries may be chunks of larger tensors.

`manifest.json`: how far training had come, and size and SHA-256 of every file. A checkpoint without it is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pipeline.contract.errors import StageError
from pipeline.contract.files import digest_bytes
from train.state import Progress

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: kind for kind, name in _NAMES.items()}
LENGTH_BYTES = 8  # of the number before the header: how long it is
_ALIGNMENT = 8  # of what follows it: no element is wider


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor; often all of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file, where no other chunk may have the same."""
        if self.shape == self.sizes:
            return self.name
        ranges = (f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class Span:
    chunk: Chunk
    start: int  # in the file, in bytes


@dataclass(frozen=True)
class Layout:
    header: bytes
    spans: tuple[Span, ...]
    bytes: int = field(default=0)  # of the whole file


def lay_out(chunks: Iterable[Chunk]) -> Layout:
    """Wide elements first, so that all are aligned without gaps, which the format does not allow."""
    row = sorted(chunks, key=lambda chunk: (-chunk.dtype.itemsize, chunk.key))
    entries: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    offset = 0
    for chunk in row:
        end = offset + chunk.bytes
        entries[chunk.key] = {"dtype": _NAMES[chunk.dtype], "shape": chunk.sizes, "data_offsets": (offset, end)}
        if chunk.key != chunk.name:
            parts[chunk.key] = (chunk.name, chunk.shape, chunk.offsets)
        offset = end
    about = {"format": "pt", **({"chunks": json.dumps(parts)} if parts else {})}  # texts alone may stand there
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return Layout(header, tuple(_spans(row, len(header))), len(header) + offset)


def read_layout(header: bytes) -> list[Span]:
    """What `lay_out` wrote; `header` is without its length."""
    entries = json.loads(header)
    about = entries.pop("__metadata__", {})
    parts = json.loads(about.get("chunks", "{}"))
    begin = LENGTH_BYTES + len(header)
    return [Span(_chunk(key, entry, parts), begin + entry["data_offsets"][0]) for key, entry in entries.items()]


def _chunk(key: str, entry: Mapping[str, Any], parts: Mapping[str, Any]) -> Chunk:
    sizes = tuple(entry["shape"])
    name, shape, offsets = parts.get(key, (key, sizes, [0] * len(sizes)))
    return Chunk(name, _TYPES[entry["dtype"]], tuple(shape), tuple(offsets), sizes)


def _spans(row: Iterable[Chunk], begin: int) -> Iterator[Span]:
    for chunk in row:
        yield Span(chunk, begin)
        begin += chunk.bytes


NAME = "manifest.json"


class Damaged(StageError):
    """A checkpoint that is not what was written; an older one may be whole."""


@dataclass(frozen=True)
class Written:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    progress: Progress
    scaler: Mapping[str, Any]
    identity: Mapping[str, Any]  # what the order of samples depends on: it must not change under a checkpoint
    world_size: int
    files: tuple[Written, ...]  # by rank

    def encode(self) -> bytes:
        """With a digest of its own content: a flipped byte is found in it, too."""
        text = _canonical(asdict(self))
        return f'{{"content": {text},\n"sha256": "{digest_bytes(text.encode())}"}}\n'.encode()


def decode(raw: bytes) -> Manifest:
    try:
        body = json.loads(raw)
        content = body["content"]
        if digest_bytes(_canonical(content).encode()) != body["sha256"]:
            raise Damaged("the digest of its manifest does not match")
        files = tuple(Written(**file) for file in content["files"])
        return Manifest(**{**content, "progress": Progress(**content["progress"]), "files": files})
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its manifest cannot be read ({error})") from error


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, allow_nan=False)
