"""Gradients of which each process holds a piece: their norm over all processes, and their mean over copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The piece in this process's memory, as a plain tensor that shares it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The local pieces of all gradients there are."""
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def clip(parameters: list[nn.Parameter], limit: float, counts: Callable[[nn.Parameter], bool]) -> Tensor:
    """Scale the gradients down to `limit` and return the norm they had, the same bits on every process.

    Several processes may hold the same piece: `counts` says whether this one's is the one that is counted.
    """
    mine = gradients(parameter for parameter in parameters if counts(parameter))
    device = local(parameters[0]).device
    norms = torch._foreach_norm(mine) if mine else (torch.zeros((), device=device),)
    square = torch.stack([norm.float() for norm in norms]).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    if limit and (held := gradients(parameters)):
        torch._foreach_mul_(held, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, copies: int) -> int:
    """One exchange for all gradients together; returns the bytes this process handed over."""
    held = gradients(parameters)
    flat = torch.cat([gradient.flatten() for gradient in held])
    dist.all_reduce(flat, group=group)
    flat /= copies
    pieces = torch.split(flat, [gradient.numel() for gradient in held])
    torch._foreach_copy_(held, [piece.view_as(gradient) for piece, gradient in zip(pieces, held, strict=True)])
    return flat.numel() * flat.element_size()
