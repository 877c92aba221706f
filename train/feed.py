"""Batches on the training device, and how long they let it wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.spec.data import Samples
from train.group import Group
from train.order import Indices
from train.seeding import drawing
from train.workers import Workers

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
