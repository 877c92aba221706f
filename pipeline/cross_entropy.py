"""The loss of a language model from hidden states and the weights of its head, without the logits of all tokens."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from pipeline.post_training import IGNORED

Gradients: TypeAlias = tuple[Tensor, Tensor]  # of the hidden states and of the weight

_CHUNK = 2048  # tokens: products are as fast as whole ones, and their logits take half a gigabyte


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, chunk: int = _CHUNK, ignore_index: int = IGNORED
) -> Tensor:
    """Return the mean cross-entropy of the logits `hidden @ weight.T`, of which only `chunk` rows exist at a time.

    `hidden` is [..., width], `weight` [vocabulary, width], and `target` has the index of each token. Tokens with
    `ignore_index` do not count; if there are no others, the loss is 0.
    """
    type_ = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else None
    total: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, target.flatten(), chunk, ignore_index, type_, torch.is_grad_enabled()
    )
    return total / (target != ignore_index).sum().clamp(min=1)


class _ChunkedSum(torch.autograd.Function):
    """The sum over tokens. Its gradients are computed with it, while the logits of a chunk are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        chunk: int,
        ignore_index: int,
        autocast_type: torch.dtype | None,
        is_training: bool,
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            compute_type = autocast_type or hidden.dtype
            head = weight.to(compute_type)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            gradients = _zero_gradients(hidden, weight) if is_training else None
            for start in range(0, len(hidden), chunk):
                tokens = slice(start, start + chunk)
                counts = target[tokens] != ignore_index
                labels = target[tokens].where(counts, 0)
                total += _add_chunk(hidden[tokens].to(compute_type), head, labels, counts, gradients, tokens)
        if gradients is not None:
            ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_output, grad_weight * grad_output, None, None, None, None, None


def _zero_gradients(hidden: Tensor, weight: Tensor) -> Gradients:
    return torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def _add_chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, counts: Tensor, gradients: Gradients | None, tokens: slice
) -> Tensor:
    """Return the sum of the losses of a chunk and add to the gradients."""
    logits = hidden @ head.T
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    label_log_probs = log_probs.gather(1, labels[:, None])[:, 0]
    if gradients is not None:
        grad_hidden, grad_weight = gradients
        grad_logits = torch.exp(log_probs, out=logits)  # in place of the logits, which are not needed again
        grad_logits.scatter_(1, labels[:, None], label_log_probs.expm1().to(logits.dtype)[:, None])
        grad_hidden[tokens] = (grad_logits @ head) * counts[:, None]
        grad_weight += grad_logits.T @ (hidden * counts[:, None])
    return -(label_log_probs * counts).sum().float()
