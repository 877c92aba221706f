"""`batch_size: auto`: the largest power of two that fits every process, and the fastest within it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from pipeline.spec.data import Samples
from pipeline.spec.errors import ResourceError
from pipeline.spec.files import write_json
from pipeline.spec.sections import Train
from pipeline.spec.task import Task
from train.group import Group
from train.memory import budget_bytes
from train.trial import Trial

FILE = "batch_size.json"
Make = Callable[[], nn.Module]
_ALIKE = 0.03  # of two speeds this close, the smaller batch is taken: it makes more steps of an epoch
_PATIENCE = 2  # doublings without a gain after which no larger batch is timed


@dataclass(frozen=True)
class Timed:
    batch_size: int
    samples_per_second: float  # of all processes together, exchange included


@dataclass(frozen=True)
class Choice:
    batch_size: int
    largest: int  # that fits
    limit: Literal["memory", "samples"]  # what a larger one would exceed
    timed: tuple[Timed, ...]


def decide_batch_size(
    task: Task, config: Train, group: Group, samples: Samples, directory: Path, make: Make | None = None
) -> int:
    """The configured one, or that of the earlier processes of this run, or what trials find."""
    if config.batch_size != "auto":
        return config.batch_size
    path = directory / FILE
    # The order of samples depends on it, so a resumed run must not choose again.
    known: int | None = group.share(json.loads(path.read_text())["batch_size"] if _first_has(path, group) else None)
    if known is not None:
        return known
    choice = find_batch_size(task, config, group, samples, make)
    if group.rank.first:
        write_json(path, asdict(choice))
        print(describe(choice), flush=True)
    return choice.batch_size


def find_batch_size(task: Task, config: Train, group: Group, samples: Samples, make: Make | None = None) -> Choice:
    """All processes try the same sizes in the same order, and hear of each what it was for the others.

    `make` builds the model, where it is not the task's own; which weights it has is all one.
    """
    budget = budget_bytes(config.memory_mb, group)
    trial = Trial(task, config, samples, group.device, make)
    exchange = max(group.gather(_exchange_seconds(trial, group)))
    candidates = sizes(len(samples), group.data_size, config.accumulate)
    largest, timed = 0, list[Timed]()
    for size in candidates:
        passes, micro = micro_batches(size, group.data_size, config.accumulate)
        if not all(group.gather(trial.fits(micro, budget))):
            break
        if still_gaining(timed):
            seconds = group.gather(trial.seconds(micro, passes))
            if None in seconds:
                break
            timed.append(Timed(size, size / (max(seconds) + exchange)))
        largest = size
    trial.clear()
    if not largest:
        raise ResourceError(
            f"train.batch_size=auto: a batch of {candidates[0]} does not fit {budget >> 20} MiB a process; "
            "raise train.memory_mb or train.accumulate, or use more processes"
        )
    return Choice(fastest(timed), largest, "samples" if largest == candidates[-1] else "memory", tuple(timed))


def sizes(samples: int, processes: int, accumulate: int) -> list[int]:
    """Powers of two from where every micro-batch has two samples, as batch norm needs; else what the split has."""
    most = samples.bit_length()
    powers = [1 << i for i in range(most) if 1 << i >= 2 * processes * accumulate]
    return [size for size in powers if size <= samples] or [samples]


def micro_batches(size: int, processes: int, accumulate: int) -> tuple[int, int]:
    """How many the largest slice is cut into, and the samples of the largest of them."""
    share = -(-size // processes)
    passes = min(accumulate, share)
    return passes, -(-share // passes)


def still_gaining(timed: Sequence[Timed]) -> bool:
    """Whether one of the last few doublings was faster than all before it."""
    speeds = [entry.samples_per_second for entry in timed]
    earlier, late = speeds[:-_PATIENCE], speeds[-_PATIENCE:]
    return not earlier or max(late) > max(earlier) * (1 + _ALIKE)


def fastest(timed: Sequence[Timed]) -> int:
    top = max(entry.samples_per_second for entry in timed)
    return next(entry.batch_size for entry in timed if entry.samples_per_second >= top * (1 - _ALIKE))


def describe(choice: Choice) -> str:
    tried = ", ".join(f"{entry.batch_size}: {entry.samples_per_second:,.0f}" for entry in choice.timed)
    return (
        f"batch size {choice.batch_size} (samples/s by size: {tried}; "
        f"the largest that fits is {choice.largest}, for want of {choice.limit})"
    )


def _first_has(path: Path, group: Group) -> bool:
    return group.rank.first and path.exists()


def _exchange_seconds(trial: Trial, group: Group) -> float:
    """What meeting once costs whatever the batch size: all gradients, summed over all processes."""
    if group.size == 1:
        return 0.0
    flat = torch.zeros(sum(p.numel() for p in trial.model.parameters() if p.requires_grad), device=group.device)
    return min(_timed_exchange(flat) for _ in range(3))


def _timed_exchange(flat: torch.Tensor) -> float:
    started = time.perf_counter()
    dist.all_reduce(flat)
    if flat.is_cuda:
        torch.cuda.synchronize(flat.device)
    return time.perf_counter() - started
