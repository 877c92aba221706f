"""How much memory a process has, and how much of it a training step will need."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from train.group import Group

_SHARE = 0.8  # of what is free; the rest is for data, buffers of the exchange and other programs
_GPU_SHARE = 0.9


def budget_bytes(memory_mb: int, group: Group) -> int:
    """What a process may fill; 0 means most of what is free, shared with the other processes of this machine."""
    if memory_mb:
        return memory_mb << 20
    if group.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(group.device)
        return int(_GPU_SHARE * (free + torch.cuda.memory_reserved(group.device)))
    here = socket.gethostname()
    return int(_SHARE * free_bytes() / group.gather(here).count(here))


def free_bytes(control: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the machine, or of the container this process runs in when that has less."""
    free: int = psutil.virtual_memory().available
    limit, used = control / "memory.max", control / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()) + _reclaimable(control / "memory.stat"))
    return max(0, free)


class Saved:
    """Counts the memory that autograd keeps between the forward pass and the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.bytes = self.largest = 0

    def counting(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:  # weights are there anyway, and operations may share what they keep
            self._known.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            self.largest = max(self.largest, storage.nbytes())
        return tensor


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Weights, their gradients and what the optimizer keeps, once it has made a step."""
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return weights + gradients + sum(tensor.nbytes for tensor in states)


def predicted(sizes: Mapping[int, int], size: int) -> int:
    """Bytes at another batch size, on the line through two that were measured."""
    if size in sizes:
        return sizes[size]
    (small, low), (large, high) = sorted(sizes.items())
    per_sample = (high - low) / (large - small)
    return max(0, round(low + per_sample * (size - small)))


def _reclaimable(stat: Path) -> int:
    """File caches that the kernel drops when memory is asked for."""
    if not stat.is_file():
        return 0
    found = dict(line.split() for line in stat.read_text().splitlines())
    return int(found.get("inactive_file", 0))
