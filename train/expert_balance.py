"""Load balance of a mixture of experts: count the tokens of each expert and even them out by a bias.

Loads are counted over all processes and logged. No token is dropped: each reaches all experts that its router chose,
and `dropped_tokens`, the difference between choices and counted loads, shows that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.system.torch_private import in_backward
from train.parallel.base import Strategy
from train.parallel.experts import expert_count
from train.process_group import ProcessGroup

_MAX_LOGGED_EXPERTS = 1024  # with more, loads of single experts would make log lines too long
_SUMS = 3  # numbers after the loads: entropy, tokens, choices
EXPERT_BIAS_UPDATE_SPEED = 0.001  # how far a step moves the bias of DeepSeek-V3's routers towards idle experts


@dataclass(frozen=True)
class Router:
    module: nn.Module
    counts: Tensor  # of each expert, then the sums; a slice of the tensor that all processes add up

    @property
    def bias(self) -> Tensor | None:
        """The bias of DeepSeek-V3's routers, which no gradient changes."""
        bias = getattr(self.module, "e_score_correction_bias", None)
        return bias if isinstance(bias, Tensor) else None

    @property
    def trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())


class ExpertBalance:
    """Counts the choices of all routers of a model; `routers` is empty where it has none."""

    def __init__(self, strategy: Strategy, group: ProcessGroup) -> None:
        self._strategy, self._group = strategy, group
        modules = [module for module in strategy.module.modules() if is_router(module)]
        sizes = [expert_count(module) + _SUMS for module in modules]
        self._step = torch.zeros(sum(sizes), dtype=torch.float64, device=group.device)
        self._window = torch.zeros_like(self._step)  # since the last line of the log
        pairs = zip(modules, torch.split(self._step, sizes), strict=True)
        self.routers = [Router(module, counts) for module, counts in pairs]
        self._sizes = sizes
        for router in self.routers:
            router.module.register_forward_hook(_counting_hook(router, strategy))

    def reset(self) -> None:
        """Forget all passes so far."""
        self._step.zero_()
        self._window.zero_()

    @torch.no_grad()
    def after_update(self) -> None:
        """Adjust the biases after an optimizer step; without lockstep, each process uses its own counts."""
        if not self.routers:
            return
        if self._strategy.lockstep:
            self._add_up(self._step)
        for router in self.routers:
            if router.bias is not None and router.trained:
                load = router.counts[:-_SUMS]
                router.bias.add_(torch.sign(load.mean() - load), alpha=EXPERT_BIAS_UPDATE_SPEED)
        self._window += self._step
        self._step.zero_()

    def metrics(self) -> dict[str, Any]:
        """Return the values for a log line; all processes take part."""
        if not self.routers:
            return {}
        if not self._strategy.lockstep:
            self._add_up(self._window)
        layers = [counts.tolist() for counts in torch.split(self._window, self._sizes)]
        self._window.zero_()
        return load_summary(layers)

    def _add_up(self, row: Tensor) -> None:
        if self._group.size > 1:
            dist.all_reduce(row)


def is_router(module: nn.Module) -> bool:
    """Recognise a router of transformers: a weight with a row per expert, and the number of experts per token."""
    count, weight = getattr(module, "num_experts", None), getattr(module, "weight", None)
    has_sizes = isinstance(count, int) and isinstance(getattr(module, "top_k", None), int)
    return has_sizes and isinstance(weight, Tensor) and weight.ndim == 2 and "Router" in type(module).__name__


def load_summary(layers: list[list[float]]) -> dict[str, Any]:
    """Summarise layers: each has its experts' loads, the entropy summed over tokens, the tokens and their choices."""
    used_layers = [i for i, layer in enumerate(layers) if layer[-2]]
    if not used_layers:
        return {}
    loads, sums = [layers[i][:-_SUMS] for i in used_layers], [layers[i][-_SUMS:] for i in used_layers]
    peaks = {
        f"layer_{i}": max(load) * len(load) / max(sum(load), 1) for i, load in zip(used_layers, loads, strict=True)
    }
    values: dict[str, Any] = {
        "experts": {
            "load_max_over_mean": sum(peaks.values()) / len(peaks),
            "router_entropy": sum(entropy / tokens for entropy, tokens, _ in sums) / len(sums),
            "dropped_tokens": sum(choices for *_, choices in sums) - sum(map(sum, loads)),
        },
        "expert_load_max_over_mean": peaks,
    }
    if sum(map(len, loads)) <= _MAX_LOGGED_EXPERTS:
        values["expert_loads"] = [[int(count) for count in load] for load in loads]
    return values


def _counting_hook(router: Router, strategy: Strategy) -> Callable[..., None]:
    experts = torch.arange(expert_count(router.module), device=router.counts.device)
    max_entropy = math.log(max(len(experts), 2))

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        if not (module.training and strategy.counts_samples) or _is_backward():
            return
        logits, _, choices = (part.detach() for part in output)
        with torch.no_grad():
            scores = logits.float().softmax(-1) if router.bias is None else _normalize(logits.float().sigmoid())
            router.counts[:-_SUMS] += (choices.reshape(-1, 1) == experts).sum(0)
            router.counts[-3] += torch.special.entr(scores).sum(dtype=torch.float64) / max_entropy
            router.counts[-2] += len(logits)
            router.counts[-1] += choices.numel()

    return hook


def _normalize(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def _is_backward() -> bool:
    """Return whether activation checkpointing recomputes a layer that was counted before."""
    return not torch.compiler.is_compiling() and in_backward()
