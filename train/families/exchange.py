"""Exchanges in the midst of a model, with the exchange its gradients need on the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def hand_round(rows: Tensor, send: Sequence[int], take: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows in the order of their takers, `send[i]` of them for process i; returned in the order of their givers."""
    found: Tensor = _HandRound.apply(rows, list(send), list(take), group)  # type: ignore[no-untyped-call]
    return found


def meet_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, of which each process uses a part: its gradient is the sum over all parts."""
    found: Tensor = _MeetBackward.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def add_up(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the processes, which all go on with in the same way: each part's gradient is that of the sum."""
    found: Tensor = _AddUp.apply(tensor, group)  # type: ignore[no-untyped-call]
    return found


def divide_backward(tensor: Tensor, divisor: int) -> Tensor:
    """The same tensor, with an nth of its gradient."""
    found: Tensor = _DivideBackward.apply(tensor, divisor)  # type: ignore[no-untyped-call]
    return found


class _HandRound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = take, send, group
        return _exchange(rows, send, take, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _exchange(gradients[0], *ctx.way_back), None, None, None


def _exchange(rows: Tensor, send: list[int], take: list[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty((sum(take), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), take, send, group=group)
    return found


class _MeetBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        return _summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        return gradients[0], None


def _summed(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _DivideBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] / ctx.divisor, None
