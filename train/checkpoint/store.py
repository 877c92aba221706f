"""The checkpoints of a run: made in the background, kept while they are of use, found again when they are whole.

What is done for a checkpoint while training goes on: one job at a time, with collectives of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from pipeline.contract.errors import PipelineError, ResourceError, StageError
from pipeline.contract.processes import Rank
from train.checkpoint.format import Manifest, Written
from train.checkpoint.load import Saved, best_of, find_newest, open_whole
from train.checkpoint.sharding import Share, share_out
from train.checkpoint.storage import Deed, Folder, Place
from train.process_group import Group
from train.state import State

_ALONE = Group(Rank(), torch.device("cpu"))


class CheckpointStore:
    """Used as a context around training: at its end the last checkpoint is complete, or its failure is raised.

    `identity` is what the order of samples depends on; a checkpoint of another one is passed over.
    """

    def __init__(
        self,
        place: Place | Path,
        keep: int,
        identity: Mapping[str, Any],
        group: Group = _ALONE,
        timeout_seconds: int = 300,
    ) -> None:
        self._place: Place = Folder(place) if isinstance(place, Path) else place
        self._keep, self._identity, self._group = keep, dict(identity), group
        self._background = Background(group, timeout_seconds)
        self._share: Share | None = None
        self._best: dict[int, int] = {}  # step → the best one it refers to

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
        else:
            self._background.leave()

    def save(self, state: State, before: Deed | None = None, after: Deed | None = None) -> None:
        """All take part. Returns when the state is copied; the last checkpoint's failure is raised now, on all.

        `before` and `after` are done in the background, by the first process: just before the checkpoint counts, and
        when it does.
        """
        self.wait()
        tensors = state.tensors
        if self._share is None:
            self._begin()
        if self._background.any(self._share is None or not self._share.fits(tensors)):
            self._share = share_out(tensors, self._background.exchange)
        assert self._share is not None
        data = self._share.take(tensors)
        self._background.start(partial(self._write, state, data, before or _nothing, after or _nothing))

    def wait(self) -> None:
        """Until the last checkpoint is complete, on all; or its failure is raised, on all."""
        if not self._background.busy:
            return
        failure = self._background.wait()
        if self._background.any(failure is not None):
            raise self._background.share(failure)

    def steps(self) -> list[int]:
        return self._place.steps()

    def newest(self) -> Saved | None:
        """The newest checkpoint that is whole, with its best one whole too. All take part and find the same."""
        return find_newest(self._place, self._identity, self._group)

    def load(self, step: int) -> Saved:
        """One checkpoint, looked at by this process alone."""
        return open_whole(self._place, step, self._identity)

    def _begin(self) -> None:
        """Two attempts at training, one of which is not quite dead yet, must not write the same files."""
        self._background.join()
        self._place.begin(self._background.share(secrets.token_hex(4)))
        if self._group.rank.first:
            self._place.clean()

    def _write(self, state: State, data: memoryview, before: Deed, after: Deed) -> PipelineError | None:
        """In the background, on every process. The first one hears of all failures and returns what all will raise."""
        step = state.progress.step
        told: Written | PipelineError
        try:
            told = self._place.write(step, f"{self._group.rank.rank}.safetensors", data)
        except Exception as error:  # the others wait to be told
            told = self._told(error, step)
            told.__cause__ = error
        files = self._background.report(told)
        if self._group.rank.first:
            return self._commit(state, files, before, after)
        return told if isinstance(told, PipelineError) else None

    def _commit(self, state: State, told: list[Any], before: Deed, after: Deed) -> PipelineError | None:
        step = state.progress.step
        failure = next((one for one in told if isinstance(one, PipelineError)), None)
        if failure is None:
            try:
                manifest = Manifest(state.progress, state.scaler, self._identity, self._group.size, tuple(told))
                self._place.commit(step, manifest.encode(), before)
                after()
                self._prune(state)
            except Exception as error:
                failure = self._told(error, step)
        if failure is not None:
            self._place.discard(step)
        return failure

    def _prune(self, state: State) -> None:
        """Keep the newest few, and the best each of them refers to.

        Later steps than the one just saved were passed over at the start; they must not count as the newest.
        """
        progress = state.progress
        self._best[progress.step] = progress.best_step
        past = [step for step in self._place.steps() if step <= progress.step]
        kept = {*past[-self._keep :], progress.best_step}
        kept |= {self._best_of(step) for step in kept.intersection(past)}
        for step in set(past) - kept:
            self._place.remove(step)

    def _best_of(self, step: int) -> int:
        if step not in self._best:
            self._best[step] = best_of(self._place, step)
        return self._best[step]

    def _told(self, error: Exception, step: int) -> PipelineError:
        """As a sentence that names the host: of many, one disk is full."""
        if isinstance(error, PipelineError):
            return error
        steps = self._place.steps()
        kept = f"the last good one is step {steps[-1]}" if steps else "there is no earlier one"
        what, host = f"the checkpoint of step {step}", socket.gethostname()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return ResourceError(
                f"disk full on {host} while writing {what}; {kept}. Free some space, then `pipe run --resume`"
            )
        if isinstance(error, OSError):
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            return ResourceError(
                f"cannot write {what} on {host}: {reason}; {kept}. Mend that, then `pipe run --resume`"
            )
        return StageError(f"cannot write {what} on {host}: {type(error).__name__}: {error}; {kept}")


def _nothing() -> None:
    """What is done before a checkpoint that nobody else waits for."""


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
