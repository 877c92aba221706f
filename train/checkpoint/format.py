"""Files of a checkpoint: one safetensors file per process, and `manifest.json`.

Entries of a safetensors file may be chunks of larger tensors. The manifest has the progress of training, and the size
and SHA-256 of every file; a checkpoint without it is incomplete.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.contract.settings.section import PIPE
from pipeline.system.errors import StageError
from pipeline.system.files import digest_bytes
from train.state import LazyTensors, Progress

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LENGTH_BYTES = 8  # size of the header's length, which comes before it
_ALIGNMENT = 8  # of the data after the header: no element is wider


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, often the whole tensor."""

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
        """Return its name in the file, which is unique there."""
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
    bytes: int  # of the whole file


def make_layout(chunks: Iterable[Chunk], facts: Mapping[str, str] | None = None) -> Layout:
    """Order the chunks, wide elements first: so all are aligned without gaps, which the format does not allow.

    `facts` are stored in the header.
    """
    ordered = sorted(chunks, key=lambda chunk: (-chunk.dtype.itemsize, chunk.key))
    offsets = list(itertools.accumulate((chunk.bytes for chunk in ordered), initial=0))
    entries: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for chunk, limits in zip(ordered, itertools.pairwise(offsets), strict=True):
        entries[chunk.key] = {"dtype": _NAMES[chunk.dtype], "shape": chunk.sizes, "data_offsets": limits}
        if chunk.key != chunk.name:
            parts[chunk.key] = (chunk.name, chunk.shape, chunk.offsets)
    metadata = {"format": "pt", **(facts or {}), **({"chunks": json.dumps(parts)} if parts else {})}  # strings only
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    spans = tuple(Span(chunk, len(header) + start) for chunk, start in zip(ordered, offsets[:-1], strict=True))
    return Layout(header, spans, len(header) + offsets[-1])


def write_tensors(path: Path, tensors: LazyTensors, facts: Mapping[str, str]) -> None:
    """Write whole tensors to a safetensors file, one after the other."""
    chunks = [
        Chunk(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape))
        for name, (shape, dtype) in tensors.shapes.items()
    ]
    layout = make_layout(chunks, facts)
    with path.open("wb") as file:
        file.write(layout.header)
        for span in layout.spans:
            file.write(tensors[span.chunk.name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())  # before the summary that calls training complete
    path.chmod(0o644)  # the next step may run as another user


def parse_header(header: bytes) -> list[Span]:
    """Return the chunks of a file from its header, without the length before it."""
    entries = json.loads(header)
    metadata = entries.pop("__metadata__", {})
    parts = json.loads(metadata.get("chunks", "{}"))
    start = LENGTH_BYTES + len(header)
    return [Span(_chunk(key, entry, parts), start + entry["data_offsets"][0]) for key, entry in entries.items()]


def _chunk(key: str, entry: Mapping[str, Any], parts: Mapping[str, Any]) -> Chunk:
    sizes = tuple(entry["shape"])
    name, shape, offsets = parts.get(key, (key, sizes, [0] * len(sizes)))
    return Chunk(name, DTYPES[entry["dtype"]], tuple(shape), tuple(offsets), sizes)


MANIFEST_NAME = "manifest.json"


class DamagedCheckpoint(StageError):
    """A checkpoint that differs from what was written; an older one may be intact."""


class NewerCheckpoint(DamagedCheckpoint):
    """An intact checkpoint that this version cannot read."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    progress: Progress
    scaler: Mapping[str, Any]
    identity: Mapping[str, Any]  # what the order of samples depends on; a resumed run must have the same
    world_size: int
    files: tuple[FileRecord, ...]  # by rank

    def encode(self) -> bytes:
        """Return JSON with a digest of the content, so that a flipped byte in it is detected, too."""
        content = asdict(self)
        text = _canonical(content)
        return f'{{"content": {text},\n"sha256": "{digest_bytes(text.encode())}"}}\n'.encode()


def decode_manifest(raw: bytes) -> Manifest:
    try:
        body = json.loads(raw)
        content = body["content"]
        if digest_bytes(_canonical(content).encode()) != body["sha256"]:
            raise DamagedCheckpoint("the digest of its manifest does not match")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"its manifest cannot be read ({error})") from error
    try:
        files = tuple(FileRecord(**file) for file in content["files"])
        return Manifest(**{**content, "progress": Progress(**content["progress"]), "files": files})
    except (KeyError, TypeError) as error:  # although the digest matches
        newer = f"written by a newer version of pipe ({error}); to fix it: pip install --upgrade {PIPE}"
        raise NewerCheckpoint(newer) from error


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, allow_nan=False)
