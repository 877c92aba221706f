"""Choose the batch size (`batch_size: auto`): the largest power of two that fits memory, and the fastest within it.

Steps are measured on a model of their own, without an exchange between processes. Memory is estimated on a CPU and
measured on a GPU.
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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.contract.data import Samples
from pipeline.contract.errors import ResourceError
from pipeline.contract.files import write_json
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from train.memory import available_bytes
from train.memory_format import choose_input_formats
from train.optim import Precision, make_optimizer, seed_step
from train.parallel.base import Objective
from train.process_group import ProcessGroup

BATCH_SIZE_FILE = "batch_size.json"
ModelFactory = Callable[[], nn.Module]
_SAME_SPEED = 0.03  # of two speeds this close, the smaller batch wins: it gives more steps per epoch
_PATIENCE = 2  # doublings without a gain, after which no larger batch is timed


@dataclass(frozen=True)
class Timing:
    batch_size: int
    samples_per_second: float  # of all processes together, exchange included


@dataclass(frozen=True)
class BatchSizeChoice:
    batch_size: int
    largest: int  # batch size that fits
    limit: Literal["memory", "samples"]  # what a larger one would exceed
    timed: tuple[Timing, ...]


def decide_batch_size(
    task: Task, config: Train, group: ProcessGroup, samples: Samples, directory: Path, make: ModelFactory | None = None
) -> int:
    """Return the configured batch size, the one this run has chosen before, or the result of measurements."""
    if config.batch_size != "auto":
        return config.batch_size
    path = directory / BATCH_SIZE_FILE
    # The order of samples depends on it, so a resumed run must not choose again.
    chosen: int | None = group.share(json.loads(path.read_text())["batch_size"] if _first_has(path, group) else None)
    if chosen is not None:
        return chosen
    choice = find_batch_size(task, config, group, samples, make)
    if group.rank.first:
        write_json(path, asdict(choice))
        print(describe_choice(choice), flush=True)
    return choice.batch_size


def find_batch_size(
    task: Task, config: Train, group: ProcessGroup, samples: Samples, make: ModelFactory | None = None
) -> BatchSizeChoice:
    """Measure the same sizes in the same order on all processes, and compare the results.

    `make` builds the model where it is not the task's own; its weights do not matter.
    """
    budget = budget_bytes(group)
    probe = StepProbe(task, config, samples, group.device, make)
    exchange = max(group.gather(_exchange_seconds(probe, group)))
    candidates = candidate_sizes(len(samples), group.data_size, config.accumulate)
    largest, timings = 0, list[Timing]()
    for size in candidates:
        passes, micro_batch_size = micro_batches(size, group.data_size, config.accumulate)
        if not all(group.gather(probe.fits(micro_batch_size, budget))):
            break
        if is_still_gaining(timings):
            seconds = group.gather(probe.seconds(micro_batch_size, passes))
            if None in seconds:
                break
            timings.append(Timing(size, size / (max(seconds) + exchange)))
        largest = size
    probe.clear()
    if not largest:
        raise ResourceError(
            f"train.batch_size=auto: a batch of {candidates[0]} does not fit {budget >> 20} MiB per process; "
            "to fix it, raise train.accumulate, or use more processes"
        )
    return BatchSizeChoice(
        fastest(timings), largest, "samples" if largest == candidates[-1] else "memory", tuple(timings)
    )


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
    return (
        f"batch size {choice.batch_size} (samples/s by size: {speeds}; "
        f"the largest that fits is {choice.largest}, limited by {choice.limit})"
    )


def _first_has(path: Path, group: ProcessGroup) -> bool:
    return group.rank.first and path.exists()


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
_MARGIN = 1.25  # for what libraries allocate: conv nets and transformers peaked up to 15 % above the estimate


class StepProbe:
    """Runs single steps without waiting for other processes, so that one that runs out of memory blocks none."""

    def __init__(
        self,
        task: Task,
        config: Train,
        samples: Samples,
        device: torch.device,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        seed_step(config.seed, -1, 0)
        self.model = (make or task.model)().to(device).train()
        formats = choose_input_formats(config, self.model, task, samples, device, logs=False)
        self._objective = Objective(task, Precision(config.precision, device), formats)
        self._optimizer = make_optimizer(self.model, config, task)
        self._samples, self._device = samples, device
        self._measured: dict[int, int] = {}

    def fits(self, micro: int, budget: int) -> bool:
        """Return whether a step with micro-batches of this size needs at most `budget` bytes."""
        try:
            needed_bytes = self.needed_bytes(micro) if self._device.type == "cpu" else self._peak_bytes(micro)
        except RuntimeError as error:
            self._clear_if_out_of_memory(error)
            return False
        return needed_bytes <= budget

    def needed_bytes(self, micro: int) -> int:
        """Estimate the memory of a step: weights, gradients, optimizer state and what autograd keeps."""
        if not self._measured:
            self._step(micro, 1)  # the optimizer has its state from here on
            self._measured = {
                size: self._activation_bytes(size) for size in (micro, min(2 * micro, len(self._samples)))
            }
        return model_bytes(self.model, self._optimizer) + interpolate_bytes(self._measured, micro)

    def seconds(self, micro: int, passes: int) -> float | None:
        """Time one step; None if it ran out of memory after all."""
        try:
            self._step(micro, passes)
            return min(self._time_step(micro, passes) for _ in range(_REPEATS))
        except RuntimeError as error:
            self._clear_if_out_of_memory(error)
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

    def _clear_if_out_of_memory(self, error: Exception) -> None:
        """Free memory after an out-of-memory error; raise any other. On a CPU only the message identifies it."""
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise error
        self.clear()

    def _activation_bytes(self, size: int) -> int:
        """Estimate what autograd keeps at its peak, when the backward pass begins."""
        batch = self._batch(size)
        activations = SavedActivations(self.model)
        with activations.counting():
            self._objective.loss(self.model, batch)
        # The backward pass starts with everything kept, and makes the gradients of a layer's input and output.
        return round(_MARGIN * (activations.bytes + 2 * activations.largest))

    def _time_step(self, micro: int, passes: int) -> float:
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


def budget_bytes(group: ProcessGroup) -> int:
    """Return the memory that a process may fill, shared with the others on this machine."""
    host = socket.gethostname()
    return available_bytes(group.device, group.gather(host).count(host))


class SavedActivations:
    """Counts the memory that autograd keeps between the forward pass and the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.bytes = self.largest = 0

    def counting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:  # weights exist anyway, and operations may share tensors
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return tensor


def model_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients and optimizer state, after the first step."""
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return weights + gradients + sum(tensor.nbytes for tensor in states)


def interpolate_bytes(sizes: Mapping[int, int], size: int) -> int:
    """Return the bytes at a batch size, on the line through two measured ones."""
    if size in sizes:
        return sizes[size]
    (small_size, small_bytes), (large_size, large_bytes) = sorted(sizes.items())
    per_sample = (large_bytes - small_bytes) / (large_size - small_size)
    return max(0, round(small_bytes + per_sample * (size - small_size)))
