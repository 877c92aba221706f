"""Sharded gradients: their norm over all processes, and their average over copies of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard in this process's memory as a plain tensor that shares it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the local shards of all gradients that exist."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def clip_gradients(parameters: list[nn.Parameter], limit: float, is_counted: Callable[[nn.Parameter], bool]) -> Tensor:
    """Scale the gradients down to the norm `limit` and return the norm they had, the same bits on every process.

    If several processes have the same shard, `is_counted` must be true on one of them only.
    """
    counted = local_gradients(parameter for parameter in parameters if is_counted(parameter))
    device = local_shard(parameters[0]).device
    norms = torch._foreach_norm(counted) if counted else (torch.zeros((), device=device),)
    square = torch.stack([norm.float() for norm in norms]).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if limit and (shards := local_gradients(parameters)):
        torch._foreach_mul_(shards, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, copies: int) -> int:
    """Average all gradients over the copies of the model in one exchange; return the bytes this process sent."""
    shards = local_gradients(parameters)
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    flat /= copies
    averages = torch.split(flat, [shard.numel() for shard in shards])
    torch._foreach_copy_(shards, [average.view_as(shard) for average, shard in zip(averages, shards, strict=True)])
    return flat.nbytes
