"""The outer weights of training that exchanges seldom: what all processes hold in common, and how it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from train.strategy.traffic import Stopwatch, Traffic


class Outer:
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
