"""Parameter server: the first process has the weights, every process computes gradients on its own copy."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.checkpoint.load import SavedCheckpoint
from train.device.compilation import compile_whole
from train.parallel.base import Strategy
from train.parallel.local_sgd import flatten, unflatten_into


class ParameterServerStrategy(Strategy):
    """`model` has the server's weights on the first process, and elsewhere this process's copy of them.

    Running statistics belong to the copies, which make the passes; when weights are validated, all processes take
    their mean, weighted by the number of passes.
    """

    lockstep = False

    def wrap_model(self) -> nn.Module:
        self.copy = copy.deepcopy(self.model) if self.group.rank.first else self.model
        self._trained = [parameter for parameter in self.copy.parameters() if parameter.requires_grad]
        self._passes = 0  # since weights were validated
        return compile_whole(self.copy, self.config)

    def gradient(self, weights: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return of a whole global batch the mean loss, the gradient's norm, and the clipped gradient as one vector."""
        unflatten_into(self._trained, weights.to(self.group.device))
        loss = self.objective.loss(self.module, batch)
        self.objective.backward(loss)
        norm = nn.utils.clip_grad_norm_(self._trained, self.config.clip_norm or math.inf)
        gradient = flatten([torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained])
        self.copy.zero_grad(set_to_none=True)
        self._passes += 1
        return loss.detach(), norm, gradient

    def sync_weights(self) -> None:
        """Give all processes the server's weights, and the mean of the running statistics."""
        self.group.broadcast(self.model.parameters())
        running = [buffer for buffer in self.copy.buffers() if buffer.is_floating_point()]
        total = self.group.total([self._passes])[0]
        if running and total:
            mean = flatten(running).mul_(self._passes / total)
            dist.all_reduce(mean)
            unflatten_into(running, mean)
        for buffer, source in zip(self.model.buffers(), self.copy.buffers(), strict=True):
            buffer.copy_(source)
        self._passes = 0
        super().sync_weights()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the server's state; the others' optimizers never step."""
        return super().optimizer_state(optimizer) if self.group.rank.first else {}

    def restore(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> None:
        super().restore(optimizer, saved)
        self.copy.load_state_dict(self.model.state_dict())
