"""`batch_size: auto`: the largest power of two that fits every process, and the fastest within it.

Training steps that count for nothing, on a model of their own and without an exchange.

How much memory a process has, and how much of it a training step will need.
"""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.contract.data import Samples
from pipeline.contract.errors import ResourceError
from pipeline.contract.files import write_json
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from train.optim import Precision, make_optimizer, seed_step
from train.parallel.base import Objective
from train.process_group import Group

BATCH_SIZE_FILE = "batch_size.json"
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
    path = directory / BATCH_SIZE_FILE
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


_REPEATS = 3  # of a timed step; the shortest counts
_MARGIN = 1.25  # what libraries need beside: conv nets and transformers peaked up to 15 % above the count


class Trial:
    """No pass here waits for another process: whoever runs out of memory leaves nobody behind."""

    def __init__(
        self,
        task: Task,
        config: Train,
        samples: Samples,
        device: torch.device,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        seed_step(config.seed, -1, 0)
        self._objective = Objective(task, Precision(config.precision, device))
        self.model = (make or task.model)().to(device).train()
        self._optimizer = make_optimizer(self.model, config.optimizer, config.weight_decay)
        self._samples, self._device = samples, device
        self._measured: dict[int, int] = {}

    def fits(self, micro: int, budget: int) -> bool:
        """Whether a step with micro-batches of this size stays within the budget of bytes."""
        try:
            needed = self.needed_bytes(micro) if self._device.type == "cpu" else self._peak_bytes(micro)
        except RuntimeError as error:
            self._forgive(error)
            return False
        return needed <= budget

    def needed_bytes(self, micro: int) -> int:
        """An estimate, the same every time: weights, gradients, optimizer state and what autograd keeps."""
        if not self._measured:
            self._step(micro, 1)  # the optimizer has its state from here on
            self._measured = {size: self._kept_bytes(size) for size in (micro, min(2 * micro, len(self._samples)))}
        return held_bytes(self.model, self._optimizer) + predicted(self._measured, micro)

    def seconds(self, micro: int, passes: int) -> float | None:
        """Of one step; None where memory ran out after all."""
        try:
            self._step(micro, passes)
            return min(self._timed(micro, passes) for _ in range(_REPEATS))
        except RuntimeError as error:
            self._forgive(error)
            return None

    def clear(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _peak_bytes(self, micro: int) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._step(micro, 1)
        return torch.cuda.max_memory_allocated(self._device)

    def _forgive(self, error: Exception) -> None:
        """Nothing but want of memory, which torch tells of a CPU in words alone."""
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise error
        self.clear()

    def _kept_bytes(self, size: int) -> int:
        """At the turn from the forward pass to the backward pass, where most is held, and a little beyond."""
        batch = self._batch(size)
        saved = Saved(self.model)
        with saved.counting():
            self._objective.loss(self.model, batch)
        # The backward pass starts with everything kept, and makes the gradients of a layer's input and output.
        return round(_MARGIN * (saved.bytes + 2 * saved.largest))

    def _timed(self, micro: int, passes: int) -> float:
        started = time.perf_counter()
        self._step(micro, passes)
        return time.perf_counter() - started

    def _step(self, micro: int, passes: int) -> None:
        batch = self._batch(micro)
        for _ in range(passes):
            self._objective.backward(self._objective.loss(self.model, batch) / passes)
        self._objective.precision.unscale(self._optimizer)
        self._objective.precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _batch(self, size: int) -> dict[str, Tensor]:
        chosen = range(min(size, len(self._samples)))
        return {name: column.to(self._device) for name, column in self._samples.batch(chosen).items()}


_SHARE = 0.8  # of what is free; the rest is for data, buffers of the exchange and other programs
_GPU_SHARE = 0.9


def budget_bytes(memory_mb: int, group: Group) -> int:
    """What a process may fill; 0 means most of what is free, shared with the other processes of this machine."""
    if memory_mb:
        return memory_mb << 20
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return int(_GPU_SHARE * (free + torch.cuda.memory_reserved(group.device)))
    here = socket.gethostname()
    return int(_SHARE * free_bytes() / group.gather(here).count(here))


def free_bytes(control: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the machine, or of the container this process runs in when that has less."""
    free: int = psutil.virtual_memory().available
    limit, used = control / "memory.max", control / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()) + _reclaimable(control / "memory.stat"))
    return max(0, free)


class Saved:
    """Counts the memory that autograd keeps between the forward pass and the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.bytes = self.largest = 0

    def counting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:  # weights are there anyway, and operations may share what they keep
            self._known.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return tensor


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights, their gradients and what the optimizer keeps, once it has made a step."""
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return weights + gradients + sum(tensor.nbytes for tensor in states)


def predicted(sizes: Mapping[int, int], size: int) -> int:
    """Bytes at another batch size, on the line through two that were measured."""
    if size in sizes:
        return sizes[size]
    (small, low), (large, high) = sorted(sizes.items())
    per_sample = (high - low) / (large - small)
    return max(0, round(low + per_sample * (size - small)))


def _reclaimable(stat: Path) -> int:
    """File caches that the kernel drops when memory is asked for."""
    if not stat.is_file():
        return 0
    found = dict(line.split() for line in stat.read_text().splitlines())
    return int(found.get("inactive_file", 0))
