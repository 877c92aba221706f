"""Local SGD and DiLoCo: every process steps by itself, and weights meet every few steps.

The outer weights of training that exchanges seldom: what all processes hold in common, and how it moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.base import Stopwatch, Strategy, Traffic
from train.state import Progress, State, above, below, optimizer_tensors, room_for_optimizer

if TYPE_CHECKING:
    from train.checkpoint.load import Saved


class LocalSGD(Strategy):
    """Exchanges weights after every `sync_every`th step of the run, and before weights are judged.

    local_sgd: everybody goes on from the average of all weights. diloco: the average is a direction for an outer
    Nesterov step (`outer_lr`, `outer_momentum`), and everybody goes on from where that leads; each process keeps the
    state of its own optimizer in both.

    With `sync_overlap` an exchange that starts after step k is applied after step k + sync_every, just before the
    next one starts: the difference between the outer weights it gives and this process's weights at step k is added
    to its weights of that moment, so that the steps computed meanwhile are kept. Before weights are judged, the
    exchange under way is applied and another one is made and waited for.

    Running statistics (floating-point buffers) are averaged only when weights are judged: they do not enter the
    passes of training, and averaging them once gives what averaging them at every exchange would.
    """

    lockstep = False

    def wrap(self) -> nn.Module:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        outer = (self.config.outer_lr, self.config.outer_momentum) if self.config.sync == "diloco" else (1.0, 0.0)
        self._outer = OuterOptimizer(self._trained, *outer, self.traffic, self.stopwatch)
        self._since = 0  # steps since an exchange started
        return super().wrap()

    def updated(self, step: int) -> None:
        self._since += 1
        if (step + 1) % self.config.sync_every == 0:
            self.group.watch.at(step, "exchange of weights")
            self._exchange(wait=not self.config.sync_overlap)

    def meeting_after(self, step: int) -> int:
        """An exchange under way is waited for at the next one."""
        every = self.config.sync_every
        first = (step // every + 1) * every
        return first + every if self.config.sync_overlap else first

    def settle(self) -> None:
        self._outer.finish()
        if self._since:
            self._exchange(wait=True)
        running = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if running:
            fill(running, self._average(running))
        super().settle()

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """The saved weights are the average; beside them stands what each process holds itself."""
        found = super().state(optimizer, progress)
        own = {**above("model.", self.weights()), **above("optimizer.", optimizer_tensors(self.model, optimizer))}
        met = above("weights.", self._met())
        return replace(found, tensors={**found.tensors, **above(self._own_prefix, own), **met})

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Another number of processes goes on with those of the first."""
        return super().moments(optimizer) if self.group.rank.first else {}

    def shared_room(self, optimizer: torch.optim.Optimizer, saved: Saved) -> dict[str, Tensor]:
        if saved.world_size != self.group.size:
            return super().shared_room(optimizer, saved)
        moments, weights = f"{self._own_prefix}optimizer.", f"{self._own_prefix}model."
        room = room_for_optimizer(self.model, optimizer, saved.shapes(moments))
        return {**above(weights, self.weights()), **above(moments, room)}

    def own_room(self, saved: Saved) -> dict[str, Tensor]:
        room = super().own_room(saved)
        return {name: tensor for name, tensor in room.items() if name.partition(".")[0] not in ("model", "optimizer")}

    def own_state(self) -> Mapping[str, Tensor]:
        return {
            **{f"outer.{name}": tensor for name, tensor in self._outer.state().items()},
            "since": torch.tensor(self._since),
        }

    def restore_own(self, tensors: Mapping[str, Tensor]) -> None:
        self._outer.restore(below("outer.", tensors))
        self._since = int(tensors.get("since", 0))

    def _exchange(self, wait: bool) -> None:
        self._outer.finish()
        self._outer.start()
        self._since = 0
        if wait:
            self._outer.finish()

    def _met(self) -> dict[str, Tensor]:
        """The average; nothing when all are equal, and what was judged is saved to the bit."""
        if not self._since and not self._outer.under_way:
            return {}
        weights = {name: tensor.clone() for name, tensor in self.weights().items() if tensor.is_floating_point()}
        met = list(weights.values())
        fill(met, self._average(met))
        return weights

    def _average(self, tensors: list[Tensor]) -> Tensor:
        row = flat(tensors).div_(self.group.size)
        with self.stopwatch.waiting():
            dist.all_reduce(row)
        self.traffic.sent_bytes += row.numel() * row.element_size()
        return row


class OuterOptimizer:
    """Nesterov SGD on the average way the processes went since the last exchange.

    With a rate of 1 and no momentum the outer weights become the average of all processes' weights.

    An exchange has two ends. `start` notes this process's weights and sends how far the outer weights are from them.
    `finish` waits for the average, makes the outer step with it, and gives this process the outer weights plus
    whatever it has learned since `start`; the next exchange sends just that.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float, traffic: Traffic, stopwatch: Stopwatch
    ) -> None:
        self._parameters, self._lr, self._momentum = parameters, lr, momentum
        self._traffic, self._stopwatch = traffic, stopwatch
        self._work: dist.Work | None = None
        self.restore({})

    def start(self) -> None:
        self._noted = flat(self._parameters)
        self._way = (self._weights - self._noted).div_(dist.get_world_size())
        self._traffic.sent_bytes += self._way.numel() * self._way.element_size()
        self._work = dist.all_reduce(self._way, async_op=True)

    def finish(self) -> None:
        """Nothing, when no exchange is under way."""
        if not self.under_way:
            return
        self._arrive()
        step = self._way
        if self._momentum:
            self._velocity.mul_(self._momentum).add_(step)
            step = step.add(self._velocity, alpha=self._momentum)
        self._weights.sub_(step, alpha=self._lr)
        learned = flat(self._parameters).sub_(self._noted)  # zero, to the bit, when no step was made since
        fill(self._parameters, learned.add_(self._weights))
        self._noted = self._way = torch.empty(0)

    @property
    def under_way(self) -> bool:
        return len(self._noted) > 0

    def state(self) -> dict[str, Tensor]:
        self._arrive()  # sooner than without a checkpoint, but what arrives is the same
        return {"weights": self._weights, "velocity": self._velocity, "noted": self._noted, "way": self._way}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Without `tensors` the outer weights are this process's own; they must be those of all others too."""
        device = self._parameters[0].device
        self._weights = tensors["weights"].to(device) if tensors else flat(self._parameters)
        still = torch.zeros_like(self._weights) if self._momentum else torch.empty(0)
        self._velocity, self._noted, self._way = (
            tensors.get(name, default).to(device)
            for name, default in (("velocity", still), ("noted", torch.empty(0)), ("way", torch.empty(0)))
        )

    def _arrive(self) -> None:
        if self._work is not None:
            with self._stopwatch.waiting():
                self._work.wait()
            self._work = None


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all numbers in one row."""
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


@torch.no_grad()
def fill(tensors: Sequence[Tensor], row: Tensor) -> None:
    for tensor, part in zip(tensors, torch.split(row, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
