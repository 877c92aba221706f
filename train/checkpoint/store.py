"""The checkpoints of a run: written in shards in the background, pruned, and found again if they are intact."""

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
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from pipeline.contract.restarts import collective_seconds
from pipeline.system.errors import PipelineError, ResourceError, StageError
from pipeline.system.processes import Rank
from pipeline.system.torch_private import foreach_copy_
from train.checkpoint.format import Chunk, FileRecord, Layout, Manifest, make_layout
from train.checkpoint.load import SavedCheckpoint, find_newest, open_checkpoint, read_best_step
from train.checkpoint.storage import Action, LocalStorage, Storage
from train.process_group import ProcessGroup
from train.state import Shape, State, local_shard

_SINGLE_PROCESS = ProcessGroup(Rank(), torch.device("cpu"))


class CheckpointStore:
    """A context for training: at its end the last checkpoint is complete, or its failure is raised.

    `identity` is what the order of samples depends on; a checkpoint with another identity is skipped.
    """

    def __init__(
        self,
        storage: Storage | Path,
        keep: int,
        identity: Mapping[str, Any],
        group: ProcessGroup = _SINGLE_PROCESS,
        timeout_seconds: int = 300,
    ) -> None:
        self._storage: Storage = LocalStorage(storage) if isinstance(storage, Path) else storage
        self._keep, self._identity, self._group = keep, dict(identity), group
        self._background = BackgroundJobs(group, timeout_seconds)
        self._shard: CheckpointShard | None = None
        self._best_steps: dict[int, int] = {}  # step → step of the best checkpoint it refers to
        self._has_warned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.wait()
        else:
            self._background.abandon()

    def save(self, state: State, before: Action | None = None, after: Action | None = None) -> None:
        """Copy the state and write it in the background; collective. Raises the last checkpoint's failure, on all.

        The first process calls `before` just before the checkpoint is complete, and `after` when it is.
        """
        self.wait()
        tensors = state.tensors
        if self._shard is None:
            self._begin()
        if self._background.any(self._shard is None or not self._shard.fits(tensors)):
            self._shard = plan_shard(tensors, self._background.process_group)
        assert self._shard is not None
        data = self._shard.copy(tensors)
        self._background.start(partial(self._write, state, data, before or _do_nothing, after or _do_nothing))

    def wait(self) -> None:
        """Wait until the last checkpoint is complete, or raise its failure; the same on all processes."""
        if not self._background.is_busy:
            return
        failure = self._background.wait()
        if self._background.any(failure is not None):
            raise self._background.broadcast(failure)

    def steps(self) -> list[int]:
        return self._storage.steps()

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest intact checkpoint; collective, the same on all."""
        return find_newest(self._storage, self._identity, self._group)

    def load(self, step: int) -> SavedCheckpoint:
        """Return one checkpoint, checked by this process only."""
        return open_checkpoint(self._storage, step, self._identity)

    def _begin(self) -> None:
        """Start an attempt; an earlier one that is still ending must not write the same files."""
        self._background.create_process_group()
        self._storage.begin(self._background.broadcast(secrets.token_hex(4)))
        if self._group.rank.first:
            self._storage.clean()

    def _write(self, state: State, data: memoryview, before: Action, after: Action) -> PipelineError | None:
        """Write the shard in the background, and return its failure; on the first process the first of all failures."""
        step = state.progress.step
        record: FileRecord | PipelineError
        try:
            record = self._storage.write(step, f"{self._group.rank.rank}.safetensors", data)
        except Exception as error:  # the first process waits for the record
            record = self._explain(error, step)
            record.__cause__ = error
        records = self._background.gather(record)
        if self._group.rank.first:
            return self._commit(state, records, before, after)
        return record if isinstance(record, PipelineError) else None

    def _commit(self, state: State, records: list[Any], before: Action, after: Action) -> PipelineError | None:
        step = state.progress.step
        failure = next((record for record in records if isinstance(record, PipelineError)), None)
        if failure is None:
            try:
                manifest = Manifest(state.progress, state.scaler, self._identity, self._group.size, tuple(records))
                self._storage.commit(step, manifest.encode(), before)
                after()
            except Exception as error:
                failure = self._explain(error, step)
        if failure is not None:
            self._storage.discard(step)
        else:
            self._prune_if_possible(state)
        return failure

    def _prune_if_possible(self, state: State) -> None:
        """Prune, and print a warning where that fails: the new checkpoint is complete."""
        try:
            self._prune(state)
        except Exception as error:  # those of fsspec have no common base
            if not self._has_warned:
                self._has_warned = True
                print(f"warning: old checkpoints cannot be removed: {error}", file=sys.stderr, flush=True)

    def _prune(self, state: State) -> None:
        """Keep the newest few checkpoints, and the best one that each of them refers to.

        Checkpoints of later steps were skipped at the start, so they do not count as the newest.
        """
        progress = state.progress
        self._best_steps[progress.step] = progress.best_step
        earlier_steps = [step for step in self._storage.steps() if step <= progress.step]
        kept_steps = {*earlier_steps[-self._keep :], progress.best_step}
        kept_steps |= {self._best_step(step) for step in kept_steps.intersection(earlier_steps)}
        for step in set(earlier_steps) - kept_steps:
            self._storage.remove(step)

    def _best_step(self, step: int) -> int:
        if step not in self._best_steps:
            self._best_steps[step] = read_best_step(self._storage, step)
        return self._best_steps[step]

    def _explain(self, error: Exception, step: int) -> PipelineError:
        """Return an error that names the host: of many machines, one may have a full disk."""
        if isinstance(error, PipelineError):
            return error
        steps = self._storage.steps()
        fallback = f"the last good one is step {steps[-1]}" if steps else "there is no earlier one"
        subject, host = f"the checkpoint of step {step}", socket.gethostname()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return ResourceError(
                f"disk full on {host} while writing {subject}; {fallback}; "
                "to fix it: free some space, then `pipe run --resume`"
            )
        if isinstance(error, OSError):
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            return ResourceError(
                f"cannot write {subject} on {host}: {reason}; {fallback}; to fix it: check the disk, "
                "then `pipe run --resume`"
            )
        return StageError(f"cannot write {subject} on {host}: {type(error).__name__}: {error}; {fallback}")


def _do_nothing() -> None:
    pass


_NICENESS = 5  # of the thread: where cores are few, training comes first
_ABANDON_TIMEOUT_SECONDS = 10.0
_MESSAGE_BYTES = 4096


class BackgroundJobs:
    """Runs the same jobs in the same order on every process, one at a time, while training continues.

    Their collectives need their own process group: those of two threads in one group get mixed up.
    """

    def __init__(self, group: ProcessGroup, timeout_seconds: int) -> None:
        self._group, self._timeout = group, timedelta(seconds=collective_seconds(timeout_seconds))
        self._threads = ThreadPoolExecutor(1, "checkpoint", _lower_priority)
        self._job: Future[PipelineError | None] | None = None
        self.process_group: dist.ProcessGroup | None = None

    def create_process_group(self) -> None:
        """Create the process group; collective, once."""
        if self._group.size > 1:
            self.process_group = dist.new_group(backend="gloo", timeout=self._timeout)

    @property
    def is_busy(self) -> bool:
        """Return whether there is a job that was not waited for; the same on every process."""
        return self._job is not None

    def start(self, job: Callable[[], PipelineError | None]) -> None:
        assert self._job is None, "the last one was waited for"
        self._job = self._threads.submit(job)

    def wait(self) -> PipelineError | None:
        """Wait for the job; return the failure that it returned, or raise what it raised."""
        if self._job is None:
            return None
        job, self._job = self._job, None
        return job.result()

    def abandon(self) -> None:
        """Give the job some time to end after a failure of training, which is reported instead of the job's."""
        if self._job is not None:
            wait([self._job], _ABANDON_TIMEOUT_SECONDS)

    def any(self, value: bool) -> bool:
        """Return whether the value is true on any process; only between jobs."""
        if self.process_group is None:
            return value
        tensor = torch.tensor(value, dtype=torch.int32)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.process_group)
        return bool(tensor)

    def gather(self, value: Any) -> list[Any]:
        """Return small values of all processes on the first one, in one round."""
        if self.process_group is None:
            return [value]
        message = _pickle_into_message(value)
        messages = [torch.empty_like(message) for _ in range(self._group.size)] if self._group.rank.first else None
        dist.gather(message, messages, dst=0, group=self.process_group)
        return [pickle.loads(row.numpy().data) for row in messages or ()]  # noqa: S301  # from our own processes

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value."""
        if self.process_group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.process_group)
        return values[0]


def _pickle_into_message(value: Any) -> torch.Tensor:
    data = pickle.dumps(value)
    if len(data) > _MESSAGE_BYTES:  # an error with a long text
        data = pickle.dumps(type(value)(f"{str(value)[: _MESSAGE_BYTES // 8]}…"))
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return message


def _lower_priority() -> None:
    if sys.platform.startswith("linux"):  # elsewhere it would apply to the whole process
        with contextlib.suppress(OSError):  # some sandboxes forbid it, which does no harm
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class CheckpointShard:
    """The part of the state that this process writes: one buffer with the layout of its file, used for every save."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        self._shapes = tensor_shapes(tensors)
        self._pinned = any(tensor.is_cuda for tensor in tensors.values())
        self._memory = torch.empty(layout.bytes, dtype=torch.uint8, pin_memory=self._pinned)
        self._memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._names = [span.chunk.name for span in layout.spans]
        self._buffers = [
            self._memory[span.start : span.start + span.chunk.bytes].view(span.chunk.dtype).view(span.chunk.sizes)
            for span in layout.spans
        ]

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a state has the shapes and types that the shard was planned for."""
        return self._shapes == tensor_shapes(tensors)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> memoryview:
        """Copy the state into the buffer and return it, ready to be written; it is valid until the next copy."""
        sources = [local_shard(tensors[name]) for name in self._names]
        if sources:  # there may be fewer tensors than processes
            foreach_copy_(self._buffers, sources, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return self._memory.numpy().data


def plan_shard(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> CheckpointShard:
    """Plan with all processes who writes what; replicated tensors are divided, so that all write about as much.

    torch's planner decides. A plan for 400 tensors takes some 75 ms, so it is made once, and again only when shapes
    change; `torch.distributed.checkpoint.save` would make it for every checkpoint.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=group is None or dist.get_rank(group) == 0)
    plan = _make_global_plan(planner, planner.create_local_plan(), group)
    return CheckpointShard(tensors, make_layout(_chunk(item) for item in plan.items))


def tensor_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _make_global_plan(planner: DefaultSavePlanner, local: SavePlan, group: dist.ProcessGroup | None) -> SavePlan:
    """Return this process's part of the plan, which the first process makes from all local plans."""
    if group is None:
        return planner.create_global_plan([local])[0][0]
    is_first, world_size = dist.get_rank(group) == 0, dist.get_world_size(group)
    local_plans: list[Any] | None = [None] * world_size if is_first else None
    dist.gather_object(local, local_plans, dst=0, group=group)
    global_plans = planner.create_global_plan(local_plans)[0] if local_plans else None
    received: list[Any] = [None]
    dist.scatter_object_list(received, global_plans, src=0, group=group)
    plan: SavePlan = received[0]
    return plan


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    assert data is not None, "a state has nothing but tensors"
    box = data.chunk
    return Chunk(item.index.fqn, data.properties.dtype, tuple(data.size), tuple(box.offsets), tuple(box.sizes))
