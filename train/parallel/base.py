"""The base of all strategies: it trains the whole model in one process, and each strategy overrides what differs.

A strategy decides which tensors each process has, and how gradients and weights are exchanged. This module also has the
objective (the task's loss in the configured precision), the measurement of what the exchange costs, and the norm and
average of sharded gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.contract.data import Samples, forward
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Outputs, Task
from pipeline.system.torch_private import after_backward, apply_to_tensors, foreach_copy_, foreach_mul_, foreach_norm
from train.checkpoint.load import SavedCheckpoint
from train.device.compilation import compile_whole
from train.device.memory_format import Formats, convert_inputs
from train.optim import Precision
from train.pretrained.materialize import Materializer
from train.process_group import ProcessGroup
from train.profiling import phase
from train.state import Progress, State, add_prefix, allocate_optimizer_state, local_shard, optimizer_tensors

_CLIP_EPSILON = 1e-6  # torch adds it to the norm, so that below the limit it would multiply by one


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of this process's slice of a global batch."""

    columns: Mapping[str, Tensor]
    count: int  # samples in it
    fraction: float | Tensor  # what its loss counts for in the mean of the global batch
    last: bool  # the last one of this step
    slice: int = 0  # number of the slice of the batch it belongs to


class Strategy:
    """How this process takes part in training; the base class trains in a single process."""

    lockstep = True  # every process sees the same gradient norm at every step
    collective_forward = False  # a forward pass of one process needs those of the others
    counts_samples = True  # no other process counts the samples of the current pass

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        group: ProcessGroup,
        config: Train,
        samples: Samples | None = None,
        materializer: Materializer | None = None,
    ) -> None:
        """`samples` and `materializer` are for strategies that split the model before it has its weights."""
        self._samples, self._materializer = samples, materializer
        self.model = move_to_device(model, group.device)  # the optimizer updates its parameters
        self.objective, self.group, self.config = objective, group, config
        self.traffic = Traffic()
        self.stopwatch = Stopwatch(group.device, self.traffic)
        self.module = self.wrap_model()  # its forward() is called in training
        self._buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._own_prefix = f"own.{group.rank.rank}."
        self._parameters = list(self.model.parameters())  # collecting them at every step would take time

    def wrap_model(self) -> nn.Module:
        """Return the module that training calls; what needs the first batch is left to `warm_up`."""
        return compile_whole(self.model, self.config)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer that the trainer uses; Horovod's exchange is part of it."""
        return optimizer

    def warm_up(self, micro_batches: Callable[[], Iterable[MicroBatch]], resumes: bool = False) -> None:
        """Do what must happen once before the first step; `resumes`: a checkpoint is about to replace all weights."""

    def slices(self, count: int) -> dict[int, range]:
        """Return this process's slices of a batch or split of `count` samples, by slice number.

        Random numbers depend on the slice number and not on the process.
        """
        return {self.group.data_rank: self.group.slice_of(count)}

    def compute_gradient(self, micro_batches: Iterable[MicroBatch]) -> Tensor:
        """Put the gradient of the global batch's mean loss into the parameters; return this slice's part of it."""
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self.stopwatch.start()
        for micro_batch in micro_batches:
            with self.gradient_sync(micro_batch.last):
                loss = self.objective.loss(self.module, micro_batch.columns)
                if micro_batch.last and self.group.size > 1:
                    self.stopwatch.expect_last_backward(loss)
                # The exchange averages gradients over the processes:
                self.objective.backward(loss * micro_batch.fraction * self.group.data_size)
            total += loss.detach().double() * micro_batch.fraction
        self.stopwatch.stop()
        return total

    def gradient_sync(self, last: bool) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        """Return a context for the passes of one micro-batch; gradients are exchanged in the last one only."""
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to the norm `limit` and return the norm it had."""
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if limit and not (norm.device.type == "cpu" and norm.item() + _CLIP_EPSILON <= limit):  # a GPU must not wait
            nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def after_update(self, step: int) -> None:
        """Exchange weights if it is time to; called when the optimizer has made global step `step`."""

    def next_sync_step(self, step: int) -> int:
        """Return the first step after `step` that no process finishes before all have reached it."""
        return step + 1

    def sync_weights(self) -> None:
        """Give every process the weights that are validated and saved."""
        self.group.broadcast(self.model.buffers())  # running statistics are saved from the first process

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        """Return outputs for validation; None where another process returns them for this one."""
        return self.objective.outputs(self.model, batch)

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """Return what this process contributes to a checkpoint."""
        weights = self.weights()
        if self.group.data_rank:  # running statistics are saved from the first copy of the model
            weights = {name: tensor for name, tensor in weights.items() if name not in self._buffers}
        tensors = {
            **add_prefix("weights.", weights),
            **add_prefix("optimizer.", self.optimizer_state(optimizer)),
            **add_prefix(self._own_prefix, self.process_state()),
        }
        return State(progress, tensors, self.objective.precision.state())

    def restore(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> None:
        own_targets = self.own_targets(saved)
        saved.load({**self.shared_targets(optimizer, saved), **add_prefix(self._own_prefix, own_targets)})
        if saved.scaler:
            self.objective.precision.restore(saved.scaler)
        self.restore_process_state(own_targets)

    def shared_targets(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> dict[str, Tensor]:
        """Return the tensors to load weights and optimizer state into, by their names in the checkpoint."""
        weights = self.weights()  # first: with it FSDP reshards what a forward pass has left whole
        optimizer_state = allocate_optimizer_state(self.model, optimizer, saved.shapes("optimizer."))
        return {**add_prefix("weights.", weights), **add_prefix("optimizer.", optimizer_state)}

    def weights(self) -> dict[str, Tensor]:
        """Return the model's tensors that this process has, by name."""
        return dict(self.model.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the optimizer's state by the names of its parameters."""
        return optimizer_tensors(self.model, optimizer)

    def process_state(self) -> Mapping[str, Tensor]:
        """Return state that only this process has and a resumed run needs, such as the remainders of compression."""
        return {}

    def restore_process_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore it; `tensors` is empty when the run resumes with another number of processes."""

    def own_targets(self, saved: SavedCheckpoint) -> dict[str, Tensor]:
        """Return tensors to load `process_state` into; none when the run resumes with another number of processes."""
        shapes = saved.shapes(self._own_prefix) if saved.world_size == self.group.size else {}
        return {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in shapes.items()}


def move_to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model whose parameters may still be on the meta device; these are materialized later."""
    if all(tensor.is_meta or tensor.device == device for tensor in (*model.parameters(), *model.buffers())):
        return model
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)
    return apply_to_tensors(model, lambda t: t if t.is_meta else t.to(device))


@dataclass
class Traffic:
    """Running totals of what the exchange costs; seconds stay zero where a strategy does not measure them."""

    sent_bytes: int = 0
    compute_seconds: float = 0.0  # forward and backward passes, without waiting for other processes
    exposed_seconds: float = 0.0  # waiting for the exchange, with nothing else to do


class Stopwatch:
    """Divides the passes of a step into computing and waiting.

    Gradients are exchanged inside backward(), so autograd reports the moment between the two: its callbacks run in
    order, and ours is queued before the one in which DistributedDataParallel waits. On a CPU a moment is a time, on a
    GPU it is an event, so that only `collect` makes the GPU wait.
    """

    def __init__(self, device: torch.device, traffic: Traffic) -> None:
        self._traffic, self._on_gpu = traffic, device.type == "cuda"
        self._now: Callable[[], Any] = _event if self._on_gpu else time.perf_counter
        self._began: Any = None
        self._computed: Any = None
        self._laps: list[tuple[Any, Any, Any]] = []
        self._waits: list[tuple[Any, Any, bool]] = []
        self._passing = False  # between start and stop
        self._last_wait = contextlib.ExitStack()

    def start(self) -> None:
        self._began, self._computed, self._passing = self._now(), None, True

    def expect_last_backward(self, loss: Tensor) -> None:
        """Note the end of the backward pass of `loss`, the last one of this step."""
        register: Any = loss.register_hook  # published without types
        register(lambda _: after_backward(self._all_computed))

    def stop(self) -> None:
        self._last_wait.close()
        self._passing = False
        if self._computed is not None:
            self._laps.append((self._began, self._computed, self._now()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure an exchange that blocks this process, between the passes or after them."""
        began, passing = self._now(), self._passing
        with phase("exchange"):
            yield
        self._waits.append((began, self._now(), passing))

    def collect(self) -> None:
        """Add what was measured to the totals."""
        if self._on_gpu and (self._laps or self._waits):
            torch.cuda.synchronize()
        for started, computed, ended in self._laps:
            self._traffic.compute_seconds += self._seconds(started, computed)
            self._traffic.exposed_seconds += self._seconds(computed, ended)
        for started, ended, passing in self._waits:
            self._traffic.exposed_seconds += self._seconds(started, ended)
            self._traffic.compute_seconds -= self._seconds(started, ended) if passing else 0.0
        self._laps.clear()
        self._waits.clear()

    def _all_computed(self) -> None:
        self._computed = self._now()
        self._last_wait.enter_context(phase("exchange"))

    def _seconds(self, start: Any, stop: Any) -> float:
        elapsed: float = start.elapsed_time(stop) / 1e3 if self._on_gpu else stop - start
        return elapsed


def _event() -> Any:
    make: Any = torch.cuda.Event  # published without types
    event = make(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Objective:
    """The task's loss on the model's declared inputs, in the configured precision."""

    task: Task
    precision: Precision
    formats: Formats = field(default_factory=dict)  # of the model's inputs

    def outputs(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Outputs:
        with self.precision.autocast():
            return self._forward(module, batch)

    def loss(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over the batch."""
        with phase("forward"), self.precision.autocast():
            return self.task.loss(self._forward(module, batch), batch)

    def _forward(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Outputs:
        return forward(module, self.task, convert_inputs(batch, self.task.inputs, self.formats))

    def backward(self, loss: Tensor) -> None:
        with phase("backward"):
            self.precision.backward(loss)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the local shards of all gradients that exist."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], limit: float, is_counted: Callable[[nn.Parameter], bool]) -> Tensor:
    """Scale the gradients down to the norm `limit` and return the norm they had, the same bits on every process.

    If several processes have the same shard, `is_counted` must be true on one of them only.
    """
    counted = local_gradients(parameter for parameter in parameters if is_counted(parameter))
    device = local_shard(parameters[0]).device
    norms = foreach_norm(counted) if counted else (torch.zeros((), device=device),)
    square = torch.stack([norm.float() for norm in norms]).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if limit and (shards := local_gradients(parameters)):
        foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, copies: int) -> int:
    """Average all gradients over the copies of the model in one exchange; return the bytes this process sent."""
    shards = local_gradients(parameters)
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    flat /= copies
    averages = torch.split(flat, [shard.numel() for shard in shards])
    foreach_copy_(shards, [average.view_as(shard) for average, shard in zip(averages, shards, strict=True)])
    return flat.nbytes
