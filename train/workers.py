"""Processes that load batches ahead of the training process, in its order; they end when it does, however it ends."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipeline.spec.errors import PipelineError, ResourceError, StageError
from pipeline.spec.step import describe

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
