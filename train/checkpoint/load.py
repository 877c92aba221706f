"""Finding an intact checkpoint, and loading it into existing tensors, whatever their sharding is now and was then.

A checkpoint is intact if every file has the size and the digest of the manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pipeline.system.errors import StageError
from train.checkpoint.format import (
    LENGTH_BYTES,
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    Span,
    decode_manifest,
    parse_header,
)
from train.checkpoint.storage import Storage
from train.process_group import ProcessGroup
from train.state import Progress, strip_prefix


class CheckpointReader(StorageReader):
    """The reader that `torch.distributed.checkpoint.load` plans with and reads from."""

    def __init__(self, storage: Storage, step: int, names: Iterable[str]) -> None:
        self._storage, self._step = storage, step
        self._files: dict[str, Tensor] = {}  # those that were needed so far
        self._locations: dict[MetadataIndex, tuple[str, Span]] = {}  # file and span of each chunk
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for name in names:
            for span in self._spans(name):
                self._add(name, span)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata(dict(self.tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk = self._chunk(item.storage_index)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                chunk = chunk.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunk)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def release(self) -> None:
        """Unmap the files: NFS cannot remove a folder with files that are mapped."""
        self._files.clear()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # it is created with its storage

    def _spans(self, name: str) -> list[Span]:
        length = int.from_bytes(self._storage.read_range(self._step, name, 0, LENGTH_BYTES), "little")
        return parse_header(self._storage.read_range(self._step, name, LENGTH_BYTES, length))

    def _add(self, name: str, span: Span) -> None:
        chunk = span.chunk
        tensor = self.tensors.setdefault(
            chunk.name, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.shape), [])
        )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        self._locations[MetadataIndex(chunk.name, chunk.offsets)] = name, span

    def _chunk(self, index: MetadataIndex) -> Tensor:
        name, location = self._locations[index]
        if name not in self._files:
            self._files[name] = self._storage.read(self._step, name)
        raw = self._files[name][location.start : location.start + location.chunk.bytes]
        return raw.view(location.chunk.dtype).view(location.chunk.sizes)


class SavedCheckpoint:
    """An intact checkpoint: its progress, and its tensors by name."""

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self.progress, self.scaler, self.world_size = manifest.progress, manifest.scaler, manifest.world_size
        self._reader = CheckpointReader(storage, manifest.progress.step, [file.name for file in manifest.files])

    def shapes(self, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return sizes and types of the tensors with this prefix, by the rest of the name."""
        shapes = {name: (entry.size, entry.properties.dtype) for name, entry in self._reader.tensors.items()}
        return strip_prefix(prefix, shapes)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load values into the tensors; of a distributed tensor each process reads its own shard."""
        shapes = self.shapes("")
        for name, tensor in tensors.items():
            if name not in shapes or shapes[name][0] != tensor.shape:
                stored_shape = str(tuple(shapes[name][0])) if name in shapes else "missing"
                raise StageError(
                    f"the checkpoint of step {self.progress.step} does not fit the model: {name} is "
                    f"{tuple(tensor.shape)} in the model and {stored_shape} in the checkpoint; "
                    "to fix it: train again with `pipe run --force train`"
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each reads by itself
            try:
                load(dict(tensors), storage_reader=self._reader, planner=planner, no_dist=True)
            finally:
                self._reader.release()

    def read_all(self, prefix: str) -> dict[str, Tensor]:
        """Return all tensors with this prefix, whole and in this process's memory."""
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in self.shapes(prefix).items()}
        self.load({f"{prefix}{name}": tensor for name, tensor in tensors.items()})
        return tensors


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
            left = Progress(step, stale_epochs=progress.stale_epochs, lost_best=lost)
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
            content = storage.read(step, file.name)
            if len(content) != file.bytes or hashlib.sha256(content.numpy().data).hexdigest() != file.sha256:
                return f"the digest of {file.name} does not match"
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a file cannot be memory-mapped
        return str(error)
    return ""


def _damage_error(step: int, reason: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"checkpoint step-{step:08d} is damaged: {reason}")
