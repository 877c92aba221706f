"""Reading a checkpoint into tensors that exist already, however their pieces lie now and lay when it was written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from train.checkpoint.layout import LENGTH_BYTES, Span, read_layout
from train.checkpoint.place import Place


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
