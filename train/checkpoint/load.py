"""Reading a checkpoint into tensors that exist already, however their pieces lie now and lay when it was written.

A checkpoint that was found whole, and what can be taken from it.

Which checkpoint is whole: every file is as long as it was, with the digest it had.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
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

from pipeline.contract.errors import StageError
from train.checkpoint.format import LENGTH_BYTES, Damaged, Manifest, Span, Written, decode, read_layout
from train.checkpoint.storage import Place
from train.process_group import Group
from train.state import Progress, below


class Reader(StorageReader):
    """The storage that `torch.distributed.checkpoint.load` plans on and reads from."""

    def __init__(self, place: Place, step: int, names: Iterable[str]) -> None:
        self._place, self._step = place, step
        self._files: dict[str, Tensor] = {}  # those that were needed
        self._found: dict[MetadataIndex, tuple[str, Span]] = {}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for name in names:
            for span in self._spans(name):
                self._learn(name, span)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata(dict(self.tensors))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            source = self._chunk(item.storage_index)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        return False  # it is made with its place

    def _spans(self, name: str) -> list[Span]:
        length = int.from_bytes(self._place.head(self._step, name, 0, LENGTH_BYTES), "little")
        return read_layout(self._place.head(self._step, name, LENGTH_BYTES, length))

    def _learn(self, name: str, span: Span) -> None:
        chunk = span.chunk
        known = self.tensors.setdefault(
            chunk.name, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.shape), [])
        )
        known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
        self._found[MetadataIndex(chunk.name, chunk.offsets)] = name, span

    def _chunk(self, index: MetadataIndex) -> Tensor:
        name, span = self._found[index]
        if name not in self._files:
            self._files[name] = self._place.read(self._step, name)
        bytes_of = self._files[name][span.start : span.start + span.chunk.bytes]
        return bytes_of.view(span.chunk.dtype).view(span.chunk.sizes)


class Saved:
    def __init__(self, place: Place, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = Reader(place, manifest.progress.step, [file.name for file in manifest.files])

    @property
    def progress(self) -> Progress:
        return self._manifest.progress

    @property
    def scaler(self) -> Mapping[str, Any]:
        return self._manifest.scaler

    @property
    def world_size(self) -> int:
        return self._manifest.world_size

    def shapes(self, prefix: str) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of the tensors whose names begin so, by the rest of the name."""
        found = {name: (entry.size, entry.properties.dtype) for name, entry in self._reader.tensors.items()}
        return below(prefix, found)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill them; of a distributed tensor each process reads its own piece."""
        stored = self.shapes("")
        for name, tensor in tensors.items():
            if name not in stored or stored[name][0] != tensor.shape:
                held = f"{tuple(stored[name][0])} of it" if name in stored else "nothing of it"
                raise StageError(
                    f"the checkpoint of step {self.progress.step} does not fit: {name} is {tuple(tensor.shape)} here, "
                    f"and it holds {held}; train anew with `pipe run --force train`"
                )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each reads by itself
            load(dict(tensors), storage_reader=self._reader, planner=planner, no_dist=True)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """All tensors whose names begin so, in this process's memory."""
        found = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in self.shapes(prefix).items()}
        self.load({f"{prefix}{name}": tensor for name, tensor in found.items()})
        return found


def find_newest(place: Place, identity: Mapping[str, Any], group: Group) -> Saved | None:
    """All take part, each looks at its share of the files."""
    for step in reversed(group.share(place.steps() if group.rank.first else [])):
        try:
            manifest = _checked_by_all(place, step, identity, group)
            if manifest.progress.best_step not in (0, step):
                _checked_by_all(place, manifest.progress.best_step, identity, group)
        except StageError as error:
            if group.rank.first:
                print(f"warning: {error}; skipped", file=sys.stderr)
        else:
            return Saved(place, manifest)
    return None


def open_whole(place: Place, step: int, identity: Mapping[str, Any]) -> Saved:
    """A checkpoint that this process looked at by itself."""
    manifest = _read(place, step, identity)
    if problem := problem_of(place, step, manifest.files):
        raise _damaged(step, problem)
    return Saved(place, manifest)


def best_of(place: Place, step: int) -> int:
    """The step of the best checkpoint that one refers to; 0 when it cannot tell."""
    try:
        return decode(place.manifest(step)).progress.best_step
    except (OSError, Damaged):
        return 0


def _checked_by_all(place: Place, step: int, identity: Mapping[str, Any], group: Group) -> Manifest:
    """The same on every process, and the same error."""
    found: Manifest | StageError
    try:
        found = _read(place, step, identity)
    except StageError as error:
        found = error
    found = group.share(found)
    if isinstance(found, StageError):
        raise found
    mine = found.files[group.rank.rank :: group.size]
    for problem in group.gather(problem_of(place, step, mine)):
        if problem:
            raise _damaged(step, problem)
    return found


def _read(place: Place, step: int, identity: Mapping[str, Any]) -> Manifest:
    try:
        manifest = decode(place.manifest(step))
    except (OSError, Damaged) as error:
        raise _damaged(step, error) from error
    if manifest.identity != identity:
        raise StageError(f"checkpoint step-{step:08d} belongs to other data or another batch order")
    return manifest


def problem_of(place: Place, step: int, files: Iterable[Written]) -> str:
    """Of the first file that is not what was written."""
    try:
        for file in files:
            content = place.read(step, file.name)
            if len(content) != file.bytes or hashlib.sha256(content.numpy().data).hexdigest() != file.sha256:
                return f"the digest of {file.name} does not match"
    except (OSError, RuntimeError) as error:  # torch's own, where a file cannot be mapped
        return str(error)
    return ""


def _damaged(step: int, why: object) -> Damaged:
    return Damaged(f"checkpoint step-{step:08d} is damaged: {why}")
