"""Load training batches: from columns in memory, in this process, or ahead of time in worker processes.

Workers load in the order of training and end when the training process does, however it ends. For a GPU, batches are
copied from pinned memory on a stream of their own, so that a copy and the passes of an earlier batch overlap.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.contract.data import Samples
from pipeline.contract.run import describe
from pipeline.system.errors import PipelineError, ResourceError, StageError
from pipeline.system.torch_private import hide_worker_info
from train.batch_order import Indices
from train.optim import sample_rng
from train.process_group import ProcessGroup
from train.sample_checksums import SampleChecksums, batch_checksums

_BATCHES_PER_WORKER = 2  # ready or under way

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
            prefetch_factor=_BATCHES_PER_WORKER,
            collate_fn=lambda batch: batch,
            pin_memory=pinned,
            worker_init_fn=parent_watch.start,
            multiprocessing_context="fork",  # a data set need not be picklable
            generator=torch.Generator(),  # the loader's own seed must not draw from the model's generator
        )
        self._parent_watch = parent_watch
        self._batches: Iterator[Any] = iter(loader)

    def next(self, request: Any) -> Any:
        """Return what was loaded for `request`, which must be the next one in order; or a LoadFailure."""
        try:
            position, batch = next(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:  # the pipe may break before the death is noticed
            raise ResourceError(
                f"a process that loads batches was killed ({error}); to fix it, lower train.workers or free memory, "
                "then `pipe run --resume`"
            ) from error
        if isinstance(batch, LoadFailure):
            return batch
        assert position == _position(request), f"batch {position} came for {_position(request)}"
        return batch

    def stop(self) -> None:
        self._batches = iter(())  # the loader's iterator ends its workers when it is freed
        self._parent_watch.stop()


@dataclass(frozen=True)
class LoadFailure:
    """An exception of a worker or of loading ahead, kept until its batch is fetched."""

    error: Exception
    trace: str = ""  # of a worker


class _LoaderDataset:
    """A dataset for torch's DataLoader: takes a request, returns its position and batch."""

    def __init__(self, load: Callable[[Any], Any]) -> None:
        self._load = load

    def __getitem__(self, request: Any) -> tuple[tuple[int, int, int], Any]:
        position = _position(request)
        try:
            return position, self._load(request)
        except PipelineError as error:
            return position, LoadFailure(error)
        except Exception as error:
            return position, LoadFailure(StageError(describe(error, Path.cwd())), traceback.format_exc())


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


_GPU_MEMORY_SHARE = 0.2  # of the free GPU memory, for columns


@dataclass(frozen=True)
class LoadRequest:
    """Request for one micro-batch of this process."""

    step: int
    part: int  # number of the micro-batch within its slice
    indices: Indices
    slice: int = 0  # number of the slice of the batch
    epoch: int = 0  # only a stream may depend on it


class _Pending(NamedTuple):
    """A batch that was loaded and may still be on its way to the GPU."""

    request: LoadRequest
    batch: LoadedBatch | LoadFailure
    copied: torch.cuda.Event | None  # None: no other stream copies it

    def is_for(self, request: LoadRequest) -> bool:
        same_place = (_position(self.request), self.request.epoch) == (_position(request), request.epoch)
        return same_place and np.array_equal(self.request.indices, request.indices)


class BatchLoader:
    """Returns batches on the training device; a batch is a pure function of its request, wherever it is loaded."""

    def __init__(self, samples: Samples, group: ProcessGroup, seed: int, workers: int, prefetch: int = 0) -> None:
        self._samples, self._device = samples, group.device
        self._seed = seed
        self._columns = None if samples.columns is None else _move_if_small(samples.columns, group.device)
        self._count = 0 if samples.columns is not None else workers
        self._workers: LoaderWorkers | None = None
        gathers_on_gpu = self._columns is not None and _device_of(self._columns).type == "cuda"
        self._prefetch = prefetch if group.device.type == "cuda" and not gathers_on_gpu else 0
        make_stream: Any = torch.cuda.Stream  # published without types
        self._copy_stream: torch.cuda.Stream | None = make_stream(group.device) if self._prefetch else None
        self._ahead: deque[_Pending] = deque()  # in the order in which they will be fetched
        self.waited_seconds = 0.0  # in which this process loaded, or waited for workers
        self.checksums: SampleChecksums | None = None  # those that the ledger compares; set before start()

    @property
    def prefetches(self) -> bool:
        """Return whether batches are copied ahead: not on a CPU, nor from columns that are on the GPU."""
        return self._copy_stream is not None

    def start(self, requests: Iterable[LoadRequest]) -> None:
        """Announce the requests that will be fetched, in order; workers may run ahead."""
        self.stop()
        if self._count:
            self._workers = LoaderWorkers(self._load, requests, self._count, pinned=self._device.type == "cuda")

    def stop(self) -> None:
        self._ahead.clear()
        if self._workers is not None:
            self._workers.stop()
        self._workers = None

    def prefetch(self, requests: Iterable[LoadRequest]) -> None:
        """Load the first of the next requests and begin to copy them.

        They are dropped when another batch is fetched, and a failure is raised when its batch is fetched.
        """
        started = time.perf_counter()
        for request in islice(requests, len(self._ahead), self._prefetch):
            if self._ahead and isinstance(self._ahead[-1].batch, LoadFailure):
                break
            self._ahead.append(self._begin(request))
        self.waited_seconds += time.perf_counter() - started

    def fetch(self, request: LoadRequest) -> LoadedBatch:
        started = time.perf_counter()
        if self._ahead and not self._ahead[0].is_for(request):
            self._ahead.clear()
        batch = self._finish(self._ahead.popleft() if self._ahead else self._begin(request))
        if self.checksums is not None and batch.checksums is None:
            batch = batch._replace(checksums=batch_checksums(batch.columns))
        self.waited_seconds += time.perf_counter() - started
        return batch

    def _begin(self, request: LoadRequest) -> _Pending:
        """Load a batch, and begin to copy it where a stream does that."""
        try:
            batch = self._read(request)
            if isinstance(batch, LoadFailure):
                return _Pending(request, batch, None)
            if self._copy_stream is None:
                return _Pending(request, batch._replace(columns=self._to_device(batch.columns)), None)
            with torch.cuda.stream(self._copy_stream):
                batch = batch._replace(columns=self._to_device(batch.columns))
                return _Pending(request, batch, self._copy_stream.record_event())
        except Exception as error:
            return _Pending(request, LoadFailure(error), None)

    def _finish(self, pending: _Pending) -> LoadedBatch:
        """Return the batch for use on the current stream."""
        if isinstance(pending.batch, LoadFailure):
            self._ahead.clear()
            sys.stderr.write(pending.batch.trace)
            raise pending.batch.error
        if pending.copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(pending.copied)
            for column in pending.batch.columns.values():
                column.record_stream(current)  # else the next copy could take its memory while it is in use
        return pending.batch

    def _read(self, request: LoadRequest) -> LoadedBatch | LoadFailure:
        if self._columns is not None:
            return self._pick(self._columns, request.indices)
        if self._workers is not None:
            return cast("LoadedBatch | LoadFailure", self._workers.next(request))
        return self._load(request)

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
        device = _device_of(columns)
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        return LoadedBatch({name: column.index_select(0, index) for name, column in columns.items()}, indices, None)

    def _to_device(self, batch: Batch) -> Batch:
        """Copy to a GPU, asynchronously: torch keeps pinned memory until the stream that copies it is done."""
        if self._device.type != "cuda" or _device_of(batch) == self._device:
            return batch
        return {name: column.pin_memory().to(self._device, non_blocking=True) for name, column in batch.items()}


def _device_of(columns: Mapping[str, Tensor]) -> torch.device:
    return next(iter(columns.values())).device


def _move_if_small(columns: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Move columns to the GPU when they take a small part of its memory."""
    if device.type != "cuda":
        return columns
    size = sum(column.numel() * column.element_size() for column in columns.values())
    free, _ = torch.cuda.mem_get_info(device)
    return {name: column.to(device) for name, column in columns.items()} if fits_on_gpu(size, free) else columns


def fits_on_gpu(size: int, free: int) -> bool:
    return size <= _GPU_MEMORY_SHARE * free
