"""One process trains the whole model; every other strategy overrides what differs.

What the exchange costs this process: bytes, and the time it had nothing else to do.

What a step minimises: the task's loss on the model's declared inputs, in the wanted precision.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pipeline.contract.data import forward
from pipeline.contract.settings.stages import Train
from pipeline.contract.task import Task
from train.optim import Precision
from train.process_group import Group
from train.profiling import phase
from train.state import Progress, State, above, optimizer_tensors, room_for_optimizer

if TYPE_CHECKING:
    from pipeline.contract.task import Outputs
    from train.checkpoint.load import Saved


_CLIP_EPSILON = 1e-6  # what torch adds to the norm: below the limit it would multiply by one


@dataclass(frozen=True)
class Part:
    """One micro-batch of this process's slice of a global batch."""

    batch: Mapping[str, Tensor]
    count: int  # samples in it
    share: float  # their share of the global batch
    last: bool  # no further micro-batch follows in this step
    slice: int = 0  # number of the slice of the batch that it is from


class Strategy:
    """The contract of a strategy: what each process holds, and how gradients and weights meet."""

    lockstep = True  # every process sees the same gradient norm at every step
    together = False  # a forward pass of one process needs those of the others
    counting = True  # the pass under way is of samples that no other process tells of

    def __init__(self, model: nn.Module, objective: Objective, group: Group, config: Train) -> None:
        self.model = placed(model, group.device)  # its parameters are what the optimizer updates
        self.objective, self.group, self.config = objective, group, config
        self.traffic = Traffic()
        self.stopwatch = Stopwatch(group.device, self.traffic)
        self.module = self.wrap()  # what forward() is called on
        self._buffers = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        self._own_prefix = f"own.{group.rank.rank}."
        self._parameters = list(self.model.parameters())  # walking through the modules at every step takes its time

    def wrap(self) -> nn.Module:
        return torch.compile(self.model) if self.config.compile else self.model  # type: ignore[return-value]

    def adopt(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer the trainer goes on with, for those whose exchange is a part of it."""
        return optimizer

    def warm_up(self, parts: Callable[[], Iterable[Part]]) -> None:
        """Before any weights are restored: whatever must have happened once before the first step counts."""

    def slices(self, count: int) -> dict[int, range]:
        """What this process works through of a batch or split of `count` samples; random draws are by its number."""
        return {self.group.data_rank: self.group.slice_of(count)}

    def backward(self, parts: Iterable[Part]) -> Tensor:
        """Leave the gradient of the global batch's mean loss; return the sum of the losses of this slice."""
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        self.stopwatch.start()
        for part in parts:
            with self.exchange(part.last):
                loss = self.objective.loss(self.module, part.batch)
                if part.last and self.group.size > 1:
                    self.stopwatch.watch(loss)
                weight = part.share * self.group.data_size  # processes are averaged
                self.objective.backward(loss if weight == 1 else loss * weight)
            total += loss.detach() * part.count
        self.stopwatch.stop()
        return total

    def exchange(self, last: bool) -> contextlib.AbstractContextManager[object]:  # noqa: ARG002
        """Around the passes of one micro-batch: gradients meet with the last one."""
        return contextlib.nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Scale the gradient down to `limit` and return the norm it had."""
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if limit and not (norm.device.type == "cpu" and norm.item() + _CLIP_EPSILON <= limit):  # a GPU must not wait
            nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def updated(self, step: int) -> None:
        """The optimizer has made global step `step`."""

    def meeting_after(self, step: int) -> int:
        """The next step that no process has made before all others had a part in it."""
        return step + 1

    def settle(self) -> None:
        """Give every process the weights that are judged and saved."""
        self.group.sync_buffers(self.model)

    def predict(self, batch: Mapping[str, Tensor]) -> Outputs | None:
        """Answers for validation; None where another process answers for this one."""
        return self.objective.outputs(self.model, batch)

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """What a checkpoint holds, of which each process gives what it has."""
        weights = self.weights()
        if self.group.data_rank:  # running statistics are those of the first copy
            weights = {name: tensor for name, tensor in weights.items() if name not in self._buffers}
        tensors = {
            **above("weights.", weights),
            **above("optimizer.", self.moments(optimizer)),
            **above(self._own_prefix, self.own_state()),
        }
        return State(progress, tensors, self.objective.precision.state())

    def restore(self, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        own = self.own_room(saved)
        saved.load({**self.shared_room(optimizer, saved), **above(self._own_prefix, own)})
        if saved.scaler:
            self.objective.precision.restore(saved.scaler)
        self.restore_own(own)

    def shared_room(self, optimizer: torch.optim.Optimizer, saved: Saved) -> dict[str, Tensor]:
        """Where weights and optimizer state are to be filled in, by their names in the checkpoint."""
        weights = self.weights()  # first: with it FSDP puts back the pieces of what a forward pass has left whole
        moments = room_for_optimizer(self.model, optimizer, saved.shapes("optimizer."))
        return {**above("weights.", weights), **above("optimizer.", moments)}

    def weights(self) -> dict[str, Tensor]:
        """By name, those of the model's tensors that this process has."""
        return dict(self.model.state_dict())

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The optimizer's state, by the names of the parameters it is of."""
        return optimizer_tensors(self.model, optimizer)

    def own_state(self) -> Mapping[str, Tensor]:
        """What only this process knows and a resumed run needs, such as the remainders of compression."""
        return {}

    def restore_own(self, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` is empty when the run resumes with another number of processes."""

    def own_room(self, saved: Saved) -> dict[str, Tensor]:
        """Tensors for what this process told of itself; none when the run resumes with another number of processes."""
        stored = saved.shapes(self._own_prefix) if saved.world_size == self.group.size else {}
        return {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in stored.items()}


def placed(model: nn.Module, device: torch.device) -> nn.Module:
    """On the device; what has no memory yet will get it there."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)
    found: nn.Module = model._apply(lambda t: t if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    return found


@dataclass
class Traffic:
    """Running totals. Seconds stay zero where a strategy does not measure them."""

    sent_bytes: int = 0
    own_seconds: float = 0.0  # forward and backward passes, without waiting for other processes
    exposed_seconds: float = 0.0  # waited for the exchange, with nothing else to do


class Stopwatch:
    """Divides the passes of a step into own work and waiting.

    Gradients meet inside backward(), so the moment between the two is asked of autograd: its callbacks run in order,
    ours is queued before the one in which DistributedDataParallel waits. A moment is a time on CPU and an event on a
    GPU, whose distances are known only later: nothing here makes a GPU wait but `collect`.
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

    def watch(self, loss: Tensor) -> None:
        """No backward pass of this step follows that of `loss`."""
        register: Any = loss.register_hook  # published without types
        register(lambda _: Variable._execution_engine.queue_callback(self._all_computed))

    def stop(self) -> None:
        self._last_wait.close()
        self._passing = False
        if self._computed is not None:
            self._laps.append((self._began, self._computed, self._now()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange that this process sits through, in the midst of the passes or after them."""
        began, passing = self._now(), self._passing
        with phase("exchange"):
            yield
        self._waits.append((began, self._now(), passing))

    def collect(self) -> None:
        """Bring the totals up to date."""
        if self._on_gpu and (self._laps or self._waits):
            torch.cuda.synchronize()
        for began, computed, ended in self._laps:
            self._traffic.own_seconds += self._seconds(began, computed)
            self._traffic.exposed_seconds += self._seconds(computed, ended)
        for began, ended, passing in self._waits:
            self._traffic.exposed_seconds += self._seconds(began, ended)
            self._traffic.own_seconds -= self._seconds(began, ended) if passing else 0.0
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
    task: Task
    precision: Precision

    def outputs(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Outputs:
        with self.precision.autocast():
            return forward(module, self.task, batch)

    def loss(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean over the samples of the batch."""
        with phase("forward"), self.precision.autocast():
            return self.task.loss(forward(module, self.task, batch), batch)

    def backward(self, loss: Tensor) -> None:
        with phase("backward"):
            self.precision.backward(loss)
