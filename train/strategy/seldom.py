"""Local SGD and DiLoCo: every process steps by itself, and weights meet every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from train.state import Progress, State, below, flatten, unflatten
from train.strategy.alone import Alone
from train.strategy.outer import Outer, fill, flat

_HELD = StateDictOptions(cpu_offload=True)


class Seldom(Alone):
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
        self._outer = Outer(self._trained, *outer, self.traffic, self.stopwatch)
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

    def state(self, optimizer: torch.optim.Optimizer, progress: Progress) -> State | None:
        """The saved weights are the average; beside them stands what each process holds itself."""
        found = super().state(optimizer, progress)
        held = self.group.collect(self._held(optimizer))
        names = [name for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()]
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        if self._since or self._outer.under_way:  # otherwise all are equal, and what was judged is saved to the bit
            met = [weights[name] for name in names]
            fill(met, self._average(met))
        if found is None:
            return None
        own = {f"{rank}.{name}": tensor for rank, one in enumerate(held) for name, tensor in one.items()}
        return replace(found, weights=weights, own={**found.own, **own})

    def restore(self, optimizer: torch.optim.Optimizer, state: State) -> None:
        own = state.own_of(self.group.rank.rank, self.group.size)
        if own:
            mine = unflatten(below("optimizer.", own), state.optimizer["param_groups"])
            state = replace(state, weights=below("model.", own), optimizer=mine)
        super().restore(optimizer, state)

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

    def _average(self, tensors: list[Tensor]) -> Tensor:
        row = flat(tensors).div_(self.group.size)
        with self.stopwatch.waiting():
            dist.all_reduce(row)
        self.traffic.sent_bytes += row.numel() * row.element_size()
        return row

    def _held(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        weights, optimizer_state = get_state_dict(self.model, optimizer, options=_HELD)
        steps = {f"optimizer.{name}": tensor for name, tensor in flatten(optimizer_state).items()}
        return {**{f"model.{name}": cast("Tensor", held) for name, held in weights.items()}, **steps}
