"""What training has come to: its progress, and everything a checkpoint holds, by names that fit a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Progress:
    """How far training has come, and how good it was."""

    step: int = 0
    best_step: int = 0
    best_loss: float | None = None
    best_validation: Mapping[str, float] = field(default_factory=dict)
    stale_epochs: int = 0


@dataclass(frozen=True)
class State:
    """Everything that is not a pure function of (seed, step)."""

    progress: Progress
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]  # by parameter name, whole: it fits any number of processes
    scaler: Mapping[str, Any]
    own: Mapping[str, Tensor] = field(default_factory=dict)  # `rank.name`: what only that process knows
    world_size: int = 1

    def own_of(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """Nothing when the run goes on with another number of processes."""
        return below(f"{rank}.", self.own) if world_size == self.world_size else {}


def flatten(optimizer: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{of}.{name}": tensor for of, entry in optimizer["state"].items() for name, tensor in entry.items()}


def unflatten(tensors: Mapping[str, Tensor], param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        of, _, name = key.rpartition(".")
        state.setdefault(of, {})[name] = tensor
    return {"state": state, "param_groups": param_groups}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
