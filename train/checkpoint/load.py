"""Finding an intact checkpoint, and loading it into existing tensors, whatever their sharding is now and was then.

A checkpoint is intact if every file has the size and the digest of the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline.system.errors import StageError
from pipeline.system.torch_private import local_box
from train.checkpoint.format import (
    LENGTH_BYTES,
    Chunk,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    NewerCheckpoint,
    Span,
    decode_manifest,
    parse_header,
)
from train.checkpoint.storage import Storage
from train.process_group import ProcessGroup
from train.state import LazyTensors, Shape, local_shard, strip_prefix


class SavedCheckpoint:
    """An intact checkpoint: its progress, and its tensors by name."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.progress, self.scaler, self.world_size = manifest.progress, manifest.scaler, manifest.world_size
        self._storage = storage
        self._spans: dict[str, list[tuple[str, Span]]] = {}  # the chunks of each tensor, with the files they are in
        for file in manifest.files:
            for span in self._read_header(file.name):
                self._spans.setdefault(span.chunk.name, []).append((file.name, span))

    def shapes(self, prefix: str) -> dict[str, Shape]:
        """Return sizes and types of the tensors with this prefix, by the rest of the name."""
        chunks = {name: spans[0][1].chunk for name, spans in self._spans.items()}
        return strip_prefix(prefix, {name: (torch.Size(chunk.shape), chunk.dtype) for name, chunk in chunks.items()})

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load values into the tensors; of a distributed tensor each process reads its own shard.

        All files are unmapped at the end: NFS cannot remove a folder with files that are mapped.
        """
        shapes = self.shapes("")
        for name, tensor in tensors.items():
            if name not in shapes or shapes[name][0] != tensor.shape:
                stored_shape = str(tuple(shapes[name][0])) if name in shapes else "missing"
                raise StageError(
                    f"the checkpoint of step {self.progress.step} does not fit the model: {name} is "
                    f"{tuple(tensor.shape)} in the model and {stored_shape} in the checkpoint; "
                    "to fix it: train again with `pipe run --force train`"
                )
        files: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            shard, offsets = local_shard(tensor), _shard_offsets(tensor)
            for file, span in self._spans[name]:
                if overlap := _overlap(shard.shape, offsets, span.chunk):
                    if file not in files:
                        files[file] = self._storage.read(self.progress.step, file)
                    raw = files[file][span.start : span.start + span.chunk.bytes]
                    in_shard, in_chunk = overlap
                    shard[in_shard].copy_(raw.view(span.chunk.dtype).view(span.chunk.sizes)[in_chunk])

    def tensors(self, prefix: str) -> LazyTensors:
        """Return all tensors with this prefix, whole."""
        return LazyTensors(self.shapes(prefix), lambda name: self._read(f"{prefix}{name}"))

    def _read(self, name: str) -> Tensor:
        """Read one tensor, and no more of the files than that."""
        whole = self._spans[name][0][1].chunk
        tensor = torch.empty(whole.shape, dtype=whole.dtype)
        for file, span in self._spans[name]:
            if overlap := _overlap(whole.shape, (0,) * len(whole.shape), span.chunk):
                raw = self._storage.read_range(self.progress.step, file, span.start, span.chunk.bytes)
                values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                tensor[overlap[0]] = values.view(whole.dtype).view(span.chunk.sizes)
        return tensor

    def _read_header(self, name: str) -> list[Span]:
        length = int.from_bytes(self._storage.read_range(self.progress.step, name, 0, LENGTH_BYTES), "little")
        return parse_header(self._storage.read_range(self.progress.step, name, LENGTH_BYTES, length))


def _shard_offsets(tensor: Tensor) -> tuple[int, ...]:
    """Return where this process's shard begins in the whole tensor."""
    if isinstance(tensor, DTensor):
        return local_box(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return (0,) * tensor.ndim


def _overlap(sizes: Sequence[int], offsets: Sequence[int], chunk: Chunk) -> list[tuple[slice, ...]]:
    """Return what a shard and a chunk have in common, as indices of the shard and of the chunk; empty if nothing."""
    starts = [max(pair) for pair in zip(offsets, chunk.offsets, strict=True)]
    stops = [min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return []
    return [
        tuple(slice(start - zero, stop - zero) for start, stop, zero in zip(starts, stops, zeros, strict=True))
        for zeros in (offsets, chunk.offsets)
    ]


def find_newest(storage: Storage, identity: Mapping[str, Any], group: ProcessGroup) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint; collective, the processes divide the checking of files.

    Where the best one so far is damaged, its progress has none: `best_step` is 0, and `lost_best` is that one.
    """
    for step in reversed(group.share(storage.steps() if group.rank.first else [])):
        try:
            manifest = _check_together(storage, step, identity, group)
        except StageError as error:
            _warn(group, f"{error}; skipped")
            continue
        progress = manifest.progress
        try:
            if progress.best_step not in (0, step):
                _check_together(storage, progress.best_step, identity, group)
        except StageError as error:
            _warn(group, f"{error}; it was the best so far, so the best one is chosen from step {step} on")
            lost = progress.lost_best or {"step": progress.best_step, "loss": progress.best_loss or 0.0}
            left = replace(progress, best_step=0, best_loss=None, best_validation={}, lost_best=lost)
            return SavedCheckpoint(storage, replace(manifest, progress=left))
        return SavedCheckpoint(storage, manifest)
    return None


def _warn(group: ProcessGroup, text: str) -> None:
    if group.rank.first:
        print(f"warning: {text}", file=sys.stderr)


def read_batch_size(storage: Storage) -> int | None:
    """Return the batch size of the newest checkpoint whose manifest can be read."""
    for step in reversed(storage.steps()):
        with contextlib.suppress(OSError, DamagedCheckpoint):
            size: int = decode_manifest(storage.manifest(step)).identity["batch_size"]
            return size
    return None


def open_checkpoint(storage: Storage, step: int, identity: Mapping[str, Any]) -> SavedCheckpoint:
    """Check all files of a checkpoint in this process, and return it."""
    manifest = _read_manifest(storage, step, identity)
    if problem := find_damage(storage, step, manifest.files):
        raise _damage_error(step, problem)
    return SavedCheckpoint(storage, manifest)


def read_best_step(storage: Storage, step: int) -> int:
    """Return the step of the best checkpoint so far; 0 if the manifest is damaged."""
    try:
        return decode_manifest(storage.manifest(step)).progress.best_step
    except (OSError, DamagedCheckpoint):
        return 0


def _check_together(storage: Storage, step: int, identity: Mapping[str, Any], group: ProcessGroup) -> Manifest:
    """Return the manifest, or raise the same error, on every process."""
    manifest: Manifest | StageError
    try:
        manifest = _read_manifest(storage, step, identity)
    except StageError as error:
        manifest = error
    manifest = group.share(manifest)
    if isinstance(manifest, StageError):
        raise manifest
    own_files = manifest.files[group.rank.rank :: group.size]
    for problem in group.gather(find_damage(storage, step, own_files)):
        if problem:
            raise _damage_error(step, problem)
    return manifest


def _read_manifest(storage: Storage, step: int, identity: Mapping[str, Any]) -> Manifest:
    try:
        manifest = decode_manifest(storage.manifest(step))
    except (OSError, DamagedCheckpoint) as error:
        raise _damage_error(step, error) from error
    if manifest.identity != identity:
        raise StageError(f"checkpoint step-{step:08d} belongs to other data or another batch order")
    return manifest


def find_damage(storage: Storage, step: int, files: Iterable[FileRecord]) -> str:
    """Return what is wrong with the first damaged file; empty if all are intact."""
    try:
        for file in files:
            digest, size = hashlib.sha256(), 0
            for block in storage.blocks(step, file.name):
                digest.update(block)
                size += len(block)
            if size != file.bytes or digest.hexdigest() != file.sha256:
                return f"the digest of {file.name} does not match"
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a file cannot be memory-mapped
        return str(error)
    return ""


def _damage_error(step: int, reason: object) -> DamagedCheckpoint:
    kind = "" if isinstance(reason, NewerCheckpoint) else "damaged: "
    return DamagedCheckpoint(f"checkpoint step-{step:08d} is {kind}{reason}")
