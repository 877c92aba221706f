"""What is done for a checkpoint while training goes on: one job at a time, with collectives of its own."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline.spec.errors import PipelineError
from train.group import Group

_LESS_URGENT = 5  # niceness of the thread: where cores are few, training comes first
_LEAVING_SECONDS = 10.0
_REPORT_BYTES = 4096
_MARGIN_SECONDS = 60  # a collective waits longer than the watchman, who knows for whom


class Background:
    """The same jobs in the same order on every process.

    Their collectives need a group that nobody else uses: those of two threads in one group get mixed up.
    """

    def __init__(self, group: Group, timeout_seconds: int) -> None:
        self._group, self._timeout = group, timedelta(seconds=timeout_seconds + _MARGIN_SECONDS)
        self._threads = ThreadPoolExecutor(1, "checkpoint", _be_less_urgent)
        self._job: Future[PipelineError | None] | None = None
        self.exchange: dist.ProcessGroup | None = None

    def join(self) -> None:
        """All take part, once."""
        if self._group.size > 1:
            self.exchange = dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def busy(self) -> bool:
        """There is a job that was not waited for; the same on every process."""
        return self._job is not None

    def start(self, job: Callable[[], PipelineError | None]) -> None:
        assert self._job is None, "the last one was waited for"
        self._job = self._threads.submit(job)

    def wait(self) -> PipelineError | None:
        """For the job under way: what it returned, which is why it failed. What it raised is raised here."""
        if self._job is None:
            return None
        job, self._job = self._job, None
        return job.result()

    def leave(self) -> None:
        """After a failure elsewhere, which is the one to tell: let the job end if it can."""
        if self._job is not None:
            wait([self._job], _LEAVING_SECONDS)

    def any(self, told: bool) -> bool:
        """Whether it is true on some process; between jobs only."""
        if self.exchange is None:
            return told
        value = torch.tensor(told, dtype=torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.exchange)
        return bool(value)

    def report(self, value: Any) -> list[Any]:
        """Everybody's few words, on the first process, in one exchange; `collect` takes two, for any size."""
        if self.exchange is None:
            return [value]
        own = _packed(value)
        rows = [torch.empty_like(own) for _ in range(self._group.size)] if self._group.rank.first else None
        dist.gather(own, rows, dst=0, group=self.exchange)
        return [pickle.loads(row.numpy().data) for row in rows or ()]  # noqa: S301  # of our own processes

    def collect(self, value: Any) -> list[Any]:
        """Everybody's value, on the first process."""
        if self.exchange is None:
            return [value]
        values: list[Any] | None = [None] * self._group.size if self._group.rank.first else None
        dist.gather_object(value, values, dst=0, group=self.exchange)
        return values or []

    def share(self, value: Any) -> Any:
        """The first process's value."""
        if self.exchange is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.exchange)
        return values[0]


def _packed(value: Any) -> torch.Tensor:
    data = pickle.dumps(value)
    if len(data) > _REPORT_BYTES:  # an error with a long text
        data = pickle.dumps(type(value)(f"{str(value)[: _REPORT_BYTES // 8]}…"))
    row = torch.zeros(_REPORT_BYTES, dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return row


def _be_less_urgent() -> None:
    if sys.platform.startswith("linux"):  # elsewhere it would be of the whole process
        with contextlib.suppress(OSError):  # some sandboxes forbid it, and all still works
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LESS_URGENT)
