"""The weights live in the first process; every process computes on a copy of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.base import Strategy
from train.parallel.local_sgd import fill, flat

if TYPE_CHECKING:
    from train.checkpoint.load import Saved


class ParameterServer(Strategy):
    """`model` holds the served weights on the first process, and elsewhere this process's copy of them.

    Running statistics belong to the copies, which make the passes; when weights are judged, everybody takes their
    mean, weighted by the number of passes.
    """

    lockstep = False

    def wrap(self) -> nn.Module:
        self.copy = copy.deepcopy(self.model) if self.group.rank.first else self.model
        self._trained = [parameter for parameter in self.copy.parameters() if parameter.requires_grad]
        self._passes = 0  # since weights were judged
        return torch.compile(self.copy) if self.config.compile else self.copy  # type: ignore[return-value]

    def gradient(self, weights: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Of a whole global batch: its mean loss, the norm of the gradient, and the gradient, clipped, as one row."""
        fill(self._trained, weights.to(self.group.device))
        loss = self.objective.loss(self.module, batch)
        self.objective.backward(loss)
        norm = nn.utils.clip_grad_norm_(self._trained, self.config.clip_norm or math.inf)
        row = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained])
        self.copy.zero_grad(set_to_none=True)
        self._passes += 1
        return loss.detach(), norm, row

    def settle(self) -> None:
        """Everybody takes the served weights, and the mean of the running statistics."""
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), 0)
        running = [buffer for buffer in self.copy.buffers() if buffer.is_floating_point()]
        total = self.group.total([self._passes])[0]
        if running and total:
            mean = flat(running).mul_(self._passes / total)
            dist.all_reduce(mean)
            fill(running, mean)
        for held, found in zip(self.model.buffers(), self.copy.buffers(), strict=True):
            held.copy_(found)
        self._passes = 0
        super().settle()

    def moments(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """The others' optimizers never step."""
        return super().moments(optimizer) if self.group.rank.first else {}

    def restore(self, optimizer: torch.optim.Optimizer, saved: Saved) -> None:
        super().restore(optimizer, saved)
        self.copy.load_state_dict(self.model.state_dict())
