"""Batches on the training device, and how long they let it wait.

Processes that load batches ahead of the training process, in its order; they end when it does, however it ends.
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
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.contract.data import Samples
from pipeline.contract.errors import PipelineError, ResourceError, StageError
from pipeline.contract.run import describe
from train.batch_order import Indices
from train.optim import drawing
from train.process_group import Group

_AHEAD = 2  # batches each worker has ready or under way

Batch = dict[str, Tensor]


class Workers:
    def __init__(self, load: Callable[[Any], Batch], jobs: Iterable[Any], count: int, pinned: bool) -> None:
        leash = _Leash()
        loader = DataLoader(
            cast("Dataset[Any]", _Loading(load)),
            sampler=cast("Sampler[Any]", jobs),
            batch_size=None,
            num_workers=count,
            prefetch_factor=_AHEAD,
            collate_fn=_as_it_is,
            pin_memory=pinned,
            worker_init_fn=leash.follow,
            multiprocessing_context="fork",  # a data set need not be picklable
            generator=torch.Generator(),  # the loader's own seed must not draw from the model's generator
        )
        self._leash = leash
        self._batches: Iterator[Any] = iter(loader)

    def next(self, job: Any) -> Batch:
        """The batch of `job`, which must be the next one in order."""
        try:
            place, found = next(self._batches)
        except (RuntimeError, ConnectionError, EOFError) as error:  # the pipe may break before the death is noticed
            raise ResourceError(
                f"a process that loads batches was killed ({error}); lower train.workers or free memory, "
                "then `pipe run --resume`"
            ) from error
        if isinstance(found, Failure):
            sys.stderr.write(found.trace)
            raise found.error
        assert place == _place(job), f"batch {place} came for {_place(job)}"
        return cast("Batch", found)

    def stop(self) -> None:
        self._batches = iter(())  # the loader's iterator ends its workers when it is freed
        self._leash.cut()


@dataclass(frozen=True)
class Failure:
    """What a worker raised, on its way to the training process."""

    error: PipelineError
    trace: str


class _Loading:
    """The loader's view of a data set: a job in, its place and batch out."""

    def __init__(self, load: Callable[[Any], Batch]) -> None:
        self._load = load

    def __getitem__(self, job: Any) -> tuple[tuple[int, int, int], Batch | Failure]:
        place = _place(job)
        try:
            return place, self._load(job)
        except PipelineError as error:
            return place, Failure(error, "")
        except Exception as error:
            return place, Failure(StageError(describe(error, Path.cwd())), traceback.format_exc())


class _Leash:
    """A pipe whose writing end the training process alone holds: its death closes it, by whatever signal."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()

    def follow(self, _worker: int) -> None:
        """In a worker, which was forked with both ends."""
        os.close(self._writing)
        threading.Thread(target=self._wait, name="leash", daemon=True).start()

    def cut(self) -> None:
        os.close(self._writing)
        os.close(self._reading)

    def _wait(self) -> None:
        os.read(self._reading, 1)
        os._exit(0)  # cut by a training process that goes on: any other status would be told there as a failure


def _place(job: Any) -> tuple[int, int, int]:
    return job.step, job.slice, job.part


def _as_it_is(found: Any) -> Any:
    return found


_GPU_SHARE = 0.2  # of the GPU's free memory that columns may take


@dataclass(frozen=True)
class Job:
    """One micro-batch of this process."""

    step: int
    part: int
    indices: Indices
    slice: int = 0  # number of the slice of the batch that it is from


class Feed:
    """A batch is a pure function of its job, wherever it is loaded: from columns, here, or in a worker."""

    def __init__(self, samples: Samples, group: Group, seed: int, workers: int) -> None:
        self._samples, self._device = samples, group.device
        self._seed = seed
        self._columns = None if samples.columns is None else _near(samples.columns, group.device)
        self._count = 0 if samples.columns is not None else workers
        self._workers: Workers | None = None
        self.waited_seconds = 0.0

    def start(self, jobs: Iterable[Job]) -> None:
        """From here on exactly these are fetched; workers may run ahead."""
        self.stop()
        if self._count:
            self._workers = Workers(self._load, jobs, self._count, pinned=self._device.type == "cuda")

    def stop(self) -> None:
        if self._workers is not None:
            self._workers.stop()
        self._workers = None

    def fetch(self, job: Job) -> dict[str, Tensor]:
        started = time.perf_counter()
        batch = self._fetch(job)
        self.waited_seconds += time.perf_counter() - started
        return batch

    def _fetch(self, job: Job) -> dict[str, Tensor]:
        if self._columns is not None:
            return self._pick(self._columns, job.indices)
        if self._workers is not None:
            return self._moved(self._workers.next(job), pinned=True)
        return self._moved(self._load(job), pinned=False)

    def _load(self, job: Job) -> dict[str, Tensor]:
        with drawing(self._seed, job.step, job.part, job.slice):
            return self._samples.batch(job.indices)

    def _pick(self, columns: Mapping[str, Tensor], indices: Indices) -> dict[str, Tensor]:
        index = torch.from_numpy(indices)
        where = next(iter(columns.values())).device
        if where.type == "cuda":
            index = index.pin_memory().to(where, non_blocking=True)
        batch = {name: column.index_select(0, index) for name, column in columns.items()}
        return batch if where == self._device else self._moved(batch, pinned=False)

    def _moved(self, batch: dict[str, Tensor], pinned: bool) -> dict[str, Tensor]:
        """A GPU takes pinned memory while the host goes on."""
        if self._device.type != "cuda":
            return batch
        ready = batch if pinned else {name: column.pin_memory() for name, column in batch.items()}
        return {name: column.to(self._device, non_blocking=True) for name, column in ready.items()}


def _near(columns: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """On the GPU when they take a small part of it, else where they are."""
    if device.type != "cuda":
        return columns
    size = sum(column.numel() * column.element_size() for column in columns.values())
    free, _ = torch.cuda.mem_get_info(device)
    return {name: column.to(device) for name, column in columns.items()} if fits(size, free) else columns


def fits(size: int, free: int) -> bool:
    return size <= _GPU_SHARE * free
