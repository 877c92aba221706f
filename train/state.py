"""What training has come to: its progress, and everything a checkpoint holds, by names that fit a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")
Shape = tuple[torch.Size, torch.dtype]


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
    """Everything that is not a pure function of (seed, step): of the tensors, those that this process holds.

    `weights.NAME` and `optimizer.NAME.WHAT` are the model's, alike on any number of processes; `own.RANK.NAME` is what
    only that process knows. They are the tensors that are trained, not copies.
    """

    progress: Progress
    tensors: Mapping[str, Tensor]
    scaler: Mapping[str, Any] = field(default_factory=dict)


def above(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By the names of the parameters, `NAME.WHAT`; a parameter that never had a gradient has none."""
    return {
        f"{name}.{what}": tensor
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for what, tensor in optimizer.state[parameter].items()
    }


def room_for_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Tensors for what is stored of this process's parameters; they are the optimizer's state from here on."""
    wanted: dict[str, dict[str, Shape]] = {}
    for key, shape in stored.items():
        name, _, what = key.rpartition(".")
        wanted.setdefault(name, {})[what] = shape
    optimizer.state.clear()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if entries := wanted.get(names[parameter]):
            optimizer.state[parameter] = {what: _like(parameter, *shape) for what, shape in entries.items()}
    return optimizer_tensors(model, optimizer)


def _like(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """A moment is cut as its parameter is, a count of steps is not."""
    if size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(size, dtype=dtype, device=parameter.device)
