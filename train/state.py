"""The state of training: its progress, and everything a checkpoint contains, under names that fit a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Value = TypeVar("Value")
Shape = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Progress:
    """How many steps are done, and the best validation so far."""

    step: int = 0
    best_step: int = 0
    best_loss: float | None = None
    best_validation: Mapping[str, float] = field(default_factory=dict)
    stale_epochs: int = 0
    lost_best: Mapping[str, float] | None = None  # step and loss of a better checkpoint that was damaged, if one was
    validated_on: str = ""  # digest of the validation data and of the code by which the best was found
    best_since: int = 0  # the step at which one of these changed, so that the best began again


@dataclass(frozen=True)
class State:
    """Everything that is not a pure function of (seed, step); of the tensors, those that this process has.

    `weights.NAME` and `optimizer.NAME.KEY` belong to the model and do not depend on the number of processes;
    `own.RANK.NAME` exists on one process only. They are the tensors in use, not copies.
    """

    progress: Progress
    tensors: Mapping[str, Tensor]
    scaler: Mapping[str, Any] = field(default_factory=dict)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read anew each time, so that no two need to be in memory."""

    def __init__(self, shapes: Mapping[str, Shape], read: Callable[[str], Tensor]) -> None:
        self.shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def add_prefix(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def strip_prefix(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard in this process's memory as a plain tensor that shares it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `NAME.KEY`; a parameter that never had a gradient has none."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
        for key, tensor in optimizer.state[parameter].items()
    }


def allocate_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Shape]
) -> dict[str, Tensor]:
    """Replace the optimizer's state by empty tensors for what is stored of this process's parameters."""
    shapes: dict[str, dict[str, Shape]] = {}
    for key, shape in stored.items():
        name, _, state_key = key.rpartition(".")
        shapes.setdefault(name, {})[state_key] = shape
    optimizer.state.clear()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if entries := shapes.get(names[parameter]):
            optimizer.state[parameter] = {key: _like(parameter, *shape) for key, shape in entries.items()}
    return optimizer_tensors(model, optimizer)


def _like(parameter: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    """Create an empty tensor; a moment is sharded like its parameter, a step count is not."""
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=parameter.device)


@contextlib.contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end, by name: a pass may replace them."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
