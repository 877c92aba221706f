"""Choose the batch size (`batch_size: auto`): the fastest power of two that fits memory.

Steps are measured on a model of their own, without an exchange between processes. A GPU that runs out of memory raises
an error. A process that runs out of it on a CPU is killed, so there a size is tried only if the step before shows that
it will fit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from pipeline.system.errors import ResourceError
from pipeline.system.files import write_json
from train.checkpoint.load import read_batch_size
from train.checkpoint.storage import Storage
from train.device.memory import LiveBytes, available_bytes, model_tensors
from train.device.memory_format import choose_input_formats
from train.optim import Precision, make_optimizer, seed_step
from train.parallel.base import Objective
from train.pretrained.materialize import BuildModel
from train.process_group import ProcessGroup

BATCH_SIZE_FILE = "batch_size.json"
_SAME_SPEED = 0.03  # of two speeds this close, the smaller batch wins: it gives more steps per epoch
_PATIENCE = 2  # doublings without a gain, after which no larger batch is timed


@dataclass(frozen=True)
class Timing:
    batch_size: int
    samples_per_second: float  # of all processes together, exchange included


@dataclass(frozen=True)
class BatchSizeChoice:
    batch_size: int
    limit: Literal["memory", "samples", "speed"]  # why no larger one was timed; speed: the last were not faster
    timed: tuple[Timing, ...]


def decide_batch_size(
    task: Task,
    config: Train,
    group: ProcessGroup,
    samples: Samples,
    directory: Path,
    make: BuildModel | None = None,
    checkpoints: Storage | None = None,
) -> int:
    """Return the configured batch size, the one this run has chosen before, or the result of measurements."""
    if config.batch_size != "auto":
        return config.batch_size
    path = directory / BATCH_SIZE_FILE
    # The order of samples depends on it, so a resumed run must not choose again.
    chosen: int | None = group.share(_earlier_choice(path, checkpoints) if group.rank.first else None)
    if chosen is not None:
        return chosen
    choice = find_batch_size(task, config, group, samples, make)
    if group.rank.first:
        write_json(path, asdict(choice))
        print(describe_choice(choice), flush=True)
    return choice.batch_size


def find_batch_size(
    task: Task, config: Train, group: ProcessGroup, samples: Samples, make: BuildModel | None = None
) -> BatchSizeChoice:
    """Measure the same sizes in the same order on all processes, and compare the results.

    `make` builds the model where it is not the task's own; its weights do not matter.
    """
    budget = budget_bytes(group)
    probe = StepProbe(task, config, samples, group, make)
    exchange = max(group.gather(_exchange_seconds(probe, group)))
    candidates = candidate_sizes(len(samples), group.data_size, config.accumulate)
    limit: Literal["memory", "samples", "speed"] = "samples"
    timings = list[Timing]()
    for size in candidates:
        if not is_still_gaining(timings):
            limit = "speed"
            break
        passes, micro_batch_size = micro_batches(size, group.data_size, config.accumulate)
        fits = all(group.gather(probe.fits(micro_batch_size, passes, budget)))
        seconds = group.gather(probe.seconds(micro_batch_size, passes)) if fits else [None]
        if None in seconds:
            limit = "memory"
            break
        timings.append(Timing(size, size / (max(seconds) + exchange)))
    probe.clear()
    if not timings:
        raise ResourceError(
            f"train.batch_size=auto: a batch of {candidates[0]} does not fit {budget >> 20} MiB per process; "
            "to fix it, raise train.accumulate, or use more processes"
        )
    return BatchSizeChoice(fastest(timings), limit, tuple(timings))


def candidate_sizes(samples: int, processes: int, accumulate: int) -> list[int]:
    """Return the powers of two with at least two samples per micro-batch, as batch norm needs; else the split."""
    most = samples.bit_length()
    powers = [1 << i for i in range(most) if 1 << i >= 2 * processes * accumulate]
    return [size for size in powers if size <= samples] or [samples]


def micro_batches(size: int, processes: int, accumulate: int) -> tuple[int, int]:
    """Return the number of micro-batches of the largest slice, and the size of the largest of them."""
    slice_size = -(-size // processes)
    passes = min(accumulate, slice_size)
    return passes, -(-slice_size // passes)


def is_still_gaining(timings: Sequence[Timing]) -> bool:
    """Return whether one of the last few doublings was faster than all before."""
    speeds = [entry.samples_per_second for entry in timings]
    earlier_speeds, late_speeds = speeds[:-_PATIENCE], speeds[-_PATIENCE:]
    return not earlier_speeds or max(late_speeds) > max(earlier_speeds) * (1 + _SAME_SPEED)


def fastest(timings: Sequence[Timing]) -> int:
    highest = max(entry.samples_per_second for entry in timings)
    return next(entry.batch_size for entry in timings if entry.samples_per_second >= highest * (1 - _SAME_SPEED))


def describe_choice(choice: BatchSizeChoice) -> str:
    speeds = ", ".join(f"{entry.batch_size}: {entry.samples_per_second:,.0f}" for entry in choice.timed)
    return f"batch size {choice.batch_size} (samples/s by size: {speeds}; limited by {choice.limit})"


def _earlier_choice(path: Path, checkpoints: Storage | None) -> int | None:
    """Return the batch size of this run, from its checkpoints where the file is damaged; None at its first start."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        size: int = json.loads(path.read_bytes())["batch_size"]
        return size
    of_checkpoints = read_batch_size(checkpoints) if checkpoints else None
    if of_checkpoints is not None:
        print(f"warning: {path.name} is damaged; the checkpoints have batches of {of_checkpoints}", file=sys.stderr)
    return of_checkpoints


def _exchange_seconds(probe: StepProbe, group: ProcessGroup) -> float:
    """Measure one all-reduce of all gradients, whose cost does not depend on the batch size."""
    if group.size == 1:
        return 0.0
    flat = torch.zeros(sum(p.numel() for p in probe.model.parameters() if p.requires_grad), device=group.device)
    return min(_time_exchange(flat) for _ in range(3))


def _time_exchange(flat: torch.Tensor) -> float:
    started = time.perf_counter()
    dist.all_reduce(flat)
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return time.perf_counter() - started


_REPEATS = 3  # of a timed step; the shortest counts


class StepProbe:
    """Runs single steps without waiting for other processes, so that one that runs out of memory blocks none."""

    def __init__(
        self, task: Task, config: Train, samples: Samples, group: ProcessGroup, make: BuildModel | None = None
    ) -> None:
        seed_step(config.seed, -1, 0)
        self.model = (make or task.model)().to(group.device).train()
        formats = choose_input_formats(self.model, task, samples, group.device, logs=False)
        self._objective = Objective(task, Precision(config.precision, group.device), formats)
        self._optimizer = make_optimizer(self.model, config, task)
        self._samples, self._device = samples, group.device
        self._frees_gradients = group.size == 1  # DistributedDataParallel keeps them in its buckets
        self._live = LiveBytes()
        self._live.count(model_tensors(self.model))
        self._needed: tuple[int, int] | None = None  # the last micro-batch on a CPU, and the peak of its step

    def fits(self, micro: int, passes: int, budget: int) -> bool:
        """Return whether a step with micro-batches of this size needs at most `budget` bytes."""
        try:
            return self.bound(micro) <= budget and self.peak_bytes(micro, passes) <= budget
        except RuntimeError as error:
            self._clear_if_out_of_memory(error)
            return False

    def bound(self, micro: int) -> int:
        """Return what a step can need by the last one on a CPU, if no part of it grows faster than its batch."""
        if self._needed is None:
            return 0
        size, peak = self._needed
        kept = self._live.bytes  # weights, optimizer state, and gradients in buckets
        return kept + (peak - kept) * micro // size

    def peak_bytes(self, micro: int, passes: int) -> int:
        """Run a step and return its peak memory; passes after the second one need no more."""
        passes = min(passes, 2)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._step_with_state(micro, passes)
            return torch.cuda.max_memory_allocated(self._device)
        self._live.peak = self._live.bytes
        with self._live:
            self._step_with_state(micro, passes)
        self._needed = micro, self._live.peak
        return self._live.peak

    def seconds(self, micro: int, passes: int) -> float | None:
        """Time one step; None if it ran out of memory after all."""
        try:
            return min(self._time_step(micro, passes) for _ in range(_REPEATS))
        except RuntimeError as error:
            self._clear_if_out_of_memory(error)
            return None

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _clear_if_out_of_memory(self, error: Exception) -> None:
        """Free memory after an out-of-memory error; raise any other. On a CPU only the message identifies it."""
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise error
        self.clear()

    def _time_step(self, micro: int, passes: int) -> float:
        started = time.perf_counter()
        self._step(micro, passes)
        return time.perf_counter() - started

    def _step_with_state(self, micro: int, passes: int) -> None:
        if not self._optimizer.state:  # the first step creates it
            self._step(micro, passes)
        self._step(micro, passes)

    def _step(self, micro: int, passes: int) -> None:
        batch = self._batch(micro)
        for _ in range(passes):
            self._objective.backward(self._objective.loss(self.model, batch) / passes)
        self._objective.precision.unscale(self._optimizer)
        self._objective.precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=self._frees_gradients)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _batch(self, size: int) -> dict[str, Tensor]:
        chosen = range(min(size, len(self._samples)))
        return {name: column.to(self._device) for name, column in self._samples.batch(chosen).items()}


def budget_bytes(group: ProcessGroup) -> int:
    """Return the memory that a process may fill, shared with the others on this machine."""
    host = socket.gethostname()
    return available_bytes(group.device, group.gather(host).count(host))
