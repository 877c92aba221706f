"""The loss of a language model without the logits of all tokens.

`log_probs_in_training` is for causal models of transformers, with any loss of the log-probabilities of their tokens;
`linear_cross_entropy` for other models, with the weight of their head.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.system.errors import ConfigError
from pipeline.user.post_training import IGNORED

Gradients: TypeAlias = tuple[Tensor, Tensor]  # of the hidden states and of the weight

_CHUNK = 2048  # tokens: products are as fast as whole ones, and their logits take half a gigabyte


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, *, chunk: int = _CHUNK, ignore_index: int = IGNORED
) -> Tensor:
    """Return the mean cross-entropy of the logits `hidden @ weight.T`, of which only `chunk` rows exist at a time.

    `hidden` is [..., width], `weight` [vocabulary, width], and `target` has the index of each token. Tokens with
    `ignore_index` do not count; if there are no others, the loss is 0.
    """
    total: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2),
        weight,
        target.flatten(),
        chunk,
        ignore_index,
        _autocast_type(hidden),
        torch.is_grad_enabled(),
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
            gradients = (torch.empty_like(hidden), _zero_gradient(weight)) if is_training else None
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


def _zero_gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=_sum_type(weight.dtype))


def _add_chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, counts: Tensor, gradients: Gradients | None, tokens: slice
) -> Tensor:
    """Return the sum of the losses of a chunk and add to the gradients."""
    logits = hidden @ head.T
    log_probs = torch.log_softmax(logits, dim=-1, dtype=_sum_type(logits.dtype))
    label_log_probs = log_probs.gather(1, labels[:, None])[:, 0]
    if gradients is not None:
        grad_hidden, grad_weight = gradients
        grad_logits = torch.exp(log_probs, out=logits)  # in place of the logits, which are not needed again
        grad_logits.scatter_(1, labels[:, None], label_log_probs.expm1().to(logits.dtype)[:, None])
        grad_hidden[tokens] = (grad_logits @ head) * counts[:, None]
        grad_weight += grad_logits.T @ (hidden * counts[:, None])
    return -(label_log_probs * counts).sum().float()


def log_probs_in_training(model: Any, chunk: int = _CHUNK) -> Any:
    """Make a causal model of transformers return, in training, the log-probability of each token of its input.

    They are in the place of the logits, [batch, length - 1], and `token_log_probs` takes both. The logits of `chunk`
    tokens exist at a time, and the backward pass computes them again, unless these are all. In evaluation the model is
    unchanged. It goes with a loss whose labels are the tokens of the input.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"log_probs_in_training: {type(model).__name__} has no head that is a linear layer without bias"
        )
    scoring = _Scoring(head, list(inspect.signature(model.forward).parameters), chunk)
    head.register_forward_pre_hook(scoring.keep_hidden)
    head.register_forward_hook(scoring.keep_logits)
    model.register_forward_hook(scoring.score, with_kwargs=True)
    return model


class _Scoring:
    """The hooks of a model and its head: in training the head gets one position, all others come after the model."""

    def __init__(self, head: nn.Linear, names: list[str], chunk: int) -> None:
        self._head, self._names, self._chunk = head, names, chunk  # the names of the model's arguments
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None

    def keep_hidden(self, head: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor] | None:
        if not head.training:
            return None
        (self._hidden,) = arguments
        return (self._hidden[:, -1:],)

    def keep_logits(self, head: nn.Module, _arguments: object, logits: Tensor) -> None:
        if head.training:
            self._logits = logits

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def score(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
        hidden, logits = self._hidden, self._logits
        if hidden is None:
            return outputs
        self._hidden = self._logits = None
        if outputs.logits is not logits:
            raise ConfigError(
                f"log_probs_in_training: the logits of {type(model).__name__} are not what its head returns: the model "
                "changes them, or the head has an adapter; to fix it, leave log_probs_in_training out"
            )
        ids = {**dict(zip(self._names, arguments, strict=False)), **keywords}["input_ids"]
        log_probs = self._log_probs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        outputs.logits = log_probs.view(len(ids), -1).clone()  # FSDP needs outputs that are no views
        return outputs

    def _log_probs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        if len(ids) <= self._chunk:
            logits = functional.linear(hidden, self._head.weight)
            return -functional.cross_entropy(logits.float(), ids, reduction="none")
        type_ = _autocast_type(hidden) or hidden.dtype
        log_probs: Tensor = _ChunkedLogProbs.apply(hidden, self._head.weight, ids, self._chunk, type_)  # type: ignore[no-untyped-call]
        return log_probs


class _ChunkedLogProbs(torch.autograd.Function):
    """The log-probability of each token. The gradient of the weight is added up in fp32, whatever the precision."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, chunk: int, type_: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids)
        ctx.chunk, ctx.type = chunk, type_
        with torch.autocast(hidden.device.type, enabled=False):
            head, result = weight.to(type_), torch.empty(len(ids), dtype=_sum_type(type_), device=hidden.device)
            for start in range(0, len(ids), chunk):
                tokens = slice(start, start + chunk)
                log_probs = _log_softmax(hidden[tokens].to(type_), head)
                result[tokens] = log_probs.gather(1, ids[tokens, None])[:, 0]
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ids = ctx.saved_tensors
        head, grad_hidden = weight.to(ctx.type), torch.empty_like(hidden)
        grad_weight = _zero_gradient(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(ids), ctx.chunk):
            tokens = slice(start, start + ctx.chunk)
            states, labels = hidden[tokens].to(ctx.type), ids[tokens, None]
            log_probs = _log_softmax(states, head)
            own = -log_probs.gather(1, labels).expm1()
            grad_logits = log_probs.exp_().neg_().scatter_(1, labels, own).mul_(grad_output[tokens, None]).to(ctx.type)
            grad_hidden[tokens] = grad_logits @ head
            if grad_weight is not None:
                grad_weight += grad_logits.T @ states
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, head: Tensor) -> Tensor:
    logits = hidden @ head.T
    return torch.log_softmax(logits, dim=-1, dtype=_sum_type(logits.dtype))


def _sum_type(type_: torch.dtype) -> torch.dtype:
    return torch.promote_types(type_, torch.float32)


def _autocast_type(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
