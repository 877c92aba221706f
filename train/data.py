"""Load training batches: from columns in memory, in this process, or ahead of time in worker processes.

Workers load in the order of training and end when the training process does, however it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.contract.data import Samples
from pipeline.contract.errors import PipelineError, ResourceError, StageError
from pipeline.contract.run import describe
from pipeline.contract.torch_private import hide_worker_info
from train.batch_order import Indices
from train.optim import sample_rng
from train.process_group import ProcessGroup
from train.sample_checksums import SampleChecksums, batch_checksums

_PREFETCH = 2  # batches each worker has ready or under way

Batch = dict[str, Tensor]


class LoadedBatch(NamedTuple):
    """A batch, and what was read for it."""

    columns: Batch
    indices: Indices
    checksums: Tensor | None  # of its samples; None: not computed yet, or not needed


class LoaderWorkers:
    """Processes that load batches ahead of the training process."""

    def __init__(self, load: Callable[[Any], Any], requests: Iterable[Any], count: int, pinned: bool) -> None:
        parent_watch = _ParentWatch()
        loader = DataLoader(
            cast("Dataset[Any]", _LoaderDataset(load)),
            sampler=cast("Sampler[Any]", requests),
            batch_size=None,
            num_workers=count,
            prefetch_factor=_PREFETCH,
            collate_fn=_identity,
            pin_memory=pinned,
            worker_init_fn=parent_watch.start,
            multiprocessing_context="fork",  # a data set need not be picklable
            generator=torch.Generator(),  # the loader's own seed must not draw from the model's generator
        )
        self._parent_watch = parent_watch
        self._batches: Iterator[Any] = iter(loader)

    def next(self, request: Any) -> Any:
        """Return what was loaded for `request`, which must be the next one in order."""
        try:
            position, batch = next(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:  # the pipe may break before the death is noticed
            raise ResourceError(
                f"a process that loads batches was killed ({error}); to fix it, lower train.workers or free memory, "
                "then `pipe run --resume`"
            ) from error
        if isinstance(batch, WorkerFailure):
            sys.stderr.write(batch.trace)
            raise batch.error
        assert position == _position(request), f"batch {position} came for {_position(request)}"
        return batch

    def stop(self) -> None:
        self._batches = iter(())  # the loader's iterator ends its workers when it is freed
        self._parent_watch.stop()


@dataclass(frozen=True)
class WorkerFailure:
    """An exception of a worker, as it is sent to the training process."""

    error: PipelineError
    trace: str


class _LoaderDataset:
    """A dataset for torch's DataLoader: takes a request, returns its position and batch."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> tuple[tuple[int, int, int], Any]:
        position = _position(request)
        try:
            return position, self._load(request)
        except PipelineError as error:
            return position, WorkerFailure(error, "")
        except Exception as error:
            return position, WorkerFailure(StageError(describe(error, Path.cwd())), traceback.format_exc())


class _ParentWatch:
    """A pipe whose writing end only the training process holds: its death, by any signal, closes it."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def start(self, _worker: int) -> None:
        """Run in a worker process, which was forked with both ends of the pipe."""
        os.close(self._writing)
        threading.Thread(target=self._wait, name="parent-watch", daemon=True).start()

    def stop(self) -> None:
        os.close(self._writing)
        os.close(self._reading)

    def _wait(self) -> None:
        os.read(self._reading, 1)
        os._exit(0)  # status 0: the training process may have stopped the watch, and would report another as a failure


def _position(request: Any) -> tuple[int, int, int]:
    return request.step, request.slice, request.part


def _identity(batch: Any) -> Any:
    return batch


_GPU_MEMORY_SHARE = 0.2  # of the free GPU memory, for columns


@dataclass(frozen=True)
class LoadRequest:
    """Request for one micro-batch of this process."""

    step: int
    part: int
    indices: Indices
    slice: int = 0  # number of the slice of the batch
    epoch: int = 0  # only a stream may depend on it


class BatchLoader:
    """Returns batches on the training device; a batch is a pure function of its request, wherever it is loaded."""

    def __init__(self, samples: Samples, group: ProcessGroup, seed: int, workers: int) -> None:
        self._samples, self._device = samples, group.device
        self._seed = seed
        self._columns = None if samples.columns is None else _move_if_small(samples.columns, group.device)
        self._count = 0 if samples.columns is not None else workers
        self._workers: LoaderWorkers | None = None
        self.waited_seconds = 0.0
        self.checksums: SampleChecksums | None = None  # those that the ledger compares; set before start()

    def start(self, requests: Iterable[LoadRequest]) -> None:
        """Announce the requests that will be fetched, in order; workers may run ahead."""
        self.stop()
        if self._count:
            self._workers = LoaderWorkers(self._load, requests, self._count, pinned=self._device.type == "cuda")

    def stop(self) -> None:
        if self._workers is not None:
            self._workers.stop()
        self._workers = None

    def fetch(self, request: LoadRequest) -> LoadedBatch:
        started = time.perf_counter()
        batch = self._fetch(request)
        if self.checksums is not None and batch.checksums is None:
            batch = batch._replace(checksums=batch_checksums(batch.columns))
        self.waited_seconds += time.perf_counter() - started
        return batch

    def _fetch(self, request: LoadRequest) -> LoadedBatch:
        if self._columns is not None:
            return self._pick(self._columns, request.indices)
        batch = self._load(request) if self._workers is None else cast("LoadedBatch", self._workers.next(request))
        return batch._replace(columns=self._to_device(batch.columns, pinned=self._workers is not None))

    def _load(self, request: LoadRequest) -> LoadedBatch:
        if self._samples.is_stream:
            hide_worker_info()
            # What a stream draws for samples that are passed over must change neither this batch nor the model.
            with sample_rng(self._seed, request.step, request.part, request.slice):
                self._samples.seek(int(request.indices[0]), request.epoch)
        with sample_rng(self._seed, request.step, request.part, request.slice):
            if not self._samples.has_collate:
                return LoadedBatch(self._samples.batch(request.indices, request.epoch), request.indices, None)
            items = self._samples.load(request.indices, request.epoch)
            checksums = self.checksums
            sums = None if checksums is None else checksums.of_items(items, request.indices, request.epoch)
            return LoadedBatch(self._samples.collate(items), request.indices, sums)

    def _pick(self, columns: Mapping[str, Tensor], indices: Indices) -> LoadedBatch:
        index = torch.from_numpy(indices)
        device = next(iter(columns.values())).device
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        batch = {name: column.index_select(0, index) for name, column in columns.items()}
        return LoadedBatch(batch if device == self._device else self._to_device(batch, pinned=False), indices, None)

    def _to_device(self, batch: dict[str, Tensor], pinned: bool) -> dict[str, Tensor]:
        """Copy to a GPU from pinned memory, asynchronously."""
        if self._device.type != "cuda":
            return batch
        ready = batch if pinned else {name: column.pin_memory() for name, column in batch.items()}
        return {name: column.to(self._device, non_blocking=True) for name, column in ready.items()}


def _move_if_small(columns: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Move columns to the GPU when they take a small part of its memory."""
    if device.type != "cuda":
        return columns
    size = sum(column.numel() * column.element_size() for column in columns.values())
    free, _ = torch.cuda.mem_get_info(device)
    return {name: column.to(device) for name, column in columns.items()} if fits_on_gpu(size, free) else columns


def fits_on_gpu(size: int, free: int) -> bool:
    return size <= _GPU_MEMORY_SHARE * free
