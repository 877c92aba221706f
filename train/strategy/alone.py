"""One process trains the whole model; every other strategy overrides what differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.state import Progress, State, above, optimizer_tensors, room_for_optimizer
from train.strategy.traffic import Stopwatch, Traffic

if TYPE_CHECKING:
    from pipeline.spec.task import Outputs
    from train.checkpoint import Saved

_CLIP_EPSILON = 1e-6  # what torch adds to the norm: below the limit it would multiply by one


@dataclass(frozen=True)
class Part:
    """One micro-batch of this process's slice of a global batch."""

    batch: Mapping[str, Tensor]
    count: int  # samples in it
    share: float  # their share of the global batch
    last: bool  # no further micro-batch follows in this step
    slice: int = 0  # number of the slice of the batch that it is from


class Alone:
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
