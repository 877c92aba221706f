"""Local SGD and DiLoCo: every process makes optimizer steps by itself, and weights are exchanged every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.checkpoint.load import SavedCheckpoint
from train.parallel.base import Stopwatch, Strategy, Traffic
from train.state import Progress, State, add_prefix, allocate_optimizer_state, optimizer_tensors, strip_prefix


class LocalSGDStrategy(Strategy):
    """Exchanges weights after every `sync_every`th step of the run, and before weights are validated.

    local_sgd: all processes continue from the average of their weights. diloco: the average is the direction of an
    outer Nesterov step (`OUTER_LR`, `OUTER_MOMENTUM`), and all processes continue from its result. Each process keeps
    its own optimizer state in both.

    With `sync_overlap` an exchange that starts after step k is applied after step k + sync_every, just before the
    next one starts: the difference between the resulting outer weights and this process's weights at step k is added
    to its current weights, so that the steps made meanwhile are kept. Before weights are validated, the pending
    exchange is applied, and another one is made and waited for.

    Running statistics (floating-point buffers) are averaged only when weights are validated: training passes do not
    read them, and averaging them once gives the same as averaging them at every exchange.
    """

    lockstep = False
    OUTER_LR = 0.7  # as in the DiLoCo paper
    OUTER_MOMENTUM = 0.9

    def wrap_model(self) -> nn.Module:
        self.group.broadcast((*self.model.parameters(), *self.model.buffers()))
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        outer_settings = (self.OUTER_LR, self.OUTER_MOMENTUM) if self.config.strategy == "diloco" else (1.0, 0.0)
        self._outer = OuterOptimizer(self._trained, *outer_settings, self.traffic, self.stopwatch)
        self._steps_since_sync = 0  # since an exchange started
        return super().wrap_model()

    def after_update(self, step: int) -> None:
        self._steps_since_sync += 1
        if (step + 1) % self.config.sync_every == 0:
            self.group.heartbeat.at(step, "exchange of weights")
            self._exchange(wait=not self.config.sync_overlap)

    def next_sync_step(self, step: int) -> int:
        """Return the next exchange; with overlap the one after it, where the next one is waited for."""
        interval = self.config.sync_every
        next_step = (step // interval + 1) * interval
        return next_step + interval if self.config.sync_overlap else next_step

    def sync_weights(self) -> None:
        self._outer.finish()
        if self._steps_since_sync:
            self._exchange(wait=True)
        statistics = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if statistics:
            unflatten_into(statistics, self._average(statistics))
        super().sync_weights()

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State:
        """Return the averaged weights, and each process's own weights and optimizer state."""
        state = super().state(optimizer, progress)
        optimizer_state = optimizer_tensors(self.model, optimizer)
        own_state = {**add_prefix("model.", self.weights()), **add_prefix("optimizer.", optimizer_state)}
        averaged = add_prefix("weights.", self._averaged_weights())
        return replace(state, tensors={**state.tensors, **add_prefix(self._own_prefix, own_state), **averaged})

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Return the first process's state, with which another number of processes continues."""
        return super().optimizer_state(optimizer) if self.group.rank.first else {}

    def shared_targets(self, optimizer: torch.optim.Optimizer, saved: SavedCheckpoint) -> dict[str, Tensor]:
        if saved.world_size != self.group.size:
            return super().shared_targets(optimizer, saved)
        weights, optimizer_prefix = f"{self._own_prefix}model.", f"{self._own_prefix}optimizer."
        optimizer_state = allocate_optimizer_state(self.model, optimizer, saved.shapes(optimizer_prefix))
        return {**add_prefix(weights, self.weights()), **add_prefix(optimizer_prefix, optimizer_state)}

    def own_targets(self, saved: SavedCheckpoint) -> dict[str, Tensor]:
        targets = super().own_targets(saved)
        return {
            name: tensor for name, tensor in targets.items() if name.partition(".")[0] not in ("model", "optimizer")
        }

    def process_state(self) -> Mapping[str, Tensor]:
        return {
            **{f"outer.{name}": tensor for name, tensor in self._outer.state().items()},
            "since": torch.tensor(self._steps_since_sync),
        }

    def restore_process_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._outer.restore(strip_prefix("outer.", tensors))
        self._steps_since_sync = int(tensors.get("since", 0))

    def _exchange(self, wait: bool) -> None:
        self._outer.finish()
        self._outer.start()
        self._steps_since_sync = 0
        if wait:
            self._outer.finish()

    def _averaged_weights(self) -> dict[str, Tensor]:
        """Return the average; nothing if all are equal, so that the validated weights are saved to the bit."""
        if not self._steps_since_sync and not self._outer.is_pending:
            return {}
        weights = {name: tensor.clone() for name, tensor in self.weights().items() if tensor.is_floating_point()}
        tensors = list(weights.values())
        unflatten_into(tensors, self._average(tensors))
        return weights

    def _average(self, tensors: list[Tensor]) -> Tensor:
        average = flatten(tensors).div_(self.group.size)
        with self.stopwatch.waiting():
            dist.all_reduce(average)
        self.traffic.sent_bytes += average.nbytes
        return average


class OuterOptimizer:
    """Nesterov SGD on the average change of the processes' weights since the last exchange.

    With a learning rate of 1 and no momentum the outer weights become the average of all processes' weights.

    `start` remembers this process's weights and sends their difference from the outer weights. `finish` waits for the
    average, makes the outer step with it, and sets this process's weights to the outer weights plus whatever it has
    learned since `start`; the next exchange sends just that.
    """

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float, traffic: Traffic, stopwatch: Stopwatch
    ) -> None:
        self._parameters, self._lr, self._momentum = parameters, lr, momentum
        self._traffic, self._stopwatch = traffic, stopwatch
        self._work: dist.Work | None = None
        self.restore({})

    def start(self) -> None:
        self._start_weights = flatten(self._parameters)
        self._difference = (self._weights - self._start_weights).div_(dist.get_world_size())
        self._traffic.sent_bytes += self._difference.nbytes
        self._work = dist.all_reduce(self._difference, async_op=True)

    def finish(self) -> None:
        """Apply the pending exchange, if there is one."""
        if not self.is_pending:
            return
        self._wait()
        step = self._difference
        if self._momentum:
            self._velocity.mul_(self._momentum).add_(step)
            step = step.add(self._velocity, alpha=self._momentum)
        self._weights.sub_(step, alpha=self._lr)
        progress = flatten(self._parameters).sub_(self._start_weights)  # exactly zero if no step was made since
        unflatten_into(self._parameters, progress.add_(self._weights))
        self._start_weights = self._difference = torch.empty(0)

    @property
    def is_pending(self) -> bool:
        """Whether an exchange was started and not finished."""
        return len(self._start_weights) > 0

    def state(self) -> dict[str, Tensor]:
        self._wait()  # earlier than without a checkpoint, but the result is the same
        return {
            "weights": self._weights,
            "velocity": self._velocity,
            "start_weights": self._start_weights,
            "difference": self._difference,
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state; without it the outer weights are this process's own, which must equal all others'."""
        device = self._parameters[0].device
        self._weights = tensors["weights"].to(device) if tensors else flatten(self._parameters)
        no_velocity = torch.zeros_like(self._weights) if self._momentum else torch.empty(0)
        self._velocity = tensors.get("velocity", no_velocity).to(device)
        self._start_weights = tensors.get("start_weights", torch.empty(0)).to(device)
        self._difference = tensors.get("difference", torch.empty(0)).to(device)

    def _wait(self) -> None:
        if self._work is not None:
            with self._stopwatch.waiting():
                self._work.wait()
            self._work = None


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all numbers in one vector."""
    return torch.cat([tensor.detach().flatten().float() for tensor in tensors])


@torch.no_grad()
def unflatten_into(tensors: Sequence[Tensor], vector: Tensor) -> None:
    """Copy the numbers of a vector into the tensors, the inverse of `flatten`."""
    for tensor, values in zip(tensors, torch.split(vector, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
