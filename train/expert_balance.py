"""How a mixture of experts shares out its tokens: counted over all processes, told, and evened out by a bias.

Nothing is dropped on the way: every token reaches all experts its router chose. `dropped_tokens` proves it by counting
what was chosen against what an expert exists for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.parallel.base import Strategy
from train.process_group import Group

_TOLD = 1024  # loads of single experts are told up to so many: more make lines of the journal too long
_SUMS = 3  # numbers beside the loads: entropy, tokens, choices


@dataclass(frozen=True)
class Router:
    module: nn.Module
    counts: Tensor  # of each expert, then the sums; a part of the row that all processes add up

    @property
    def bias(self) -> Tensor | None:
        """DeepSeek-V3's, which no gradient moves."""
        found = getattr(self.module, "e_score_correction_bias", None)
        return found if isinstance(found, Tensor) else None

    @property
    def trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())


class Routing:
    """Of a model without routers it costs nothing."""

    def __init__(self, strategy: Strategy, group: Group, rate: float) -> None:
        self._strategy, self._group, self._rate = strategy, group, rate
        modules = [module for module in strategy.module.modules() if is_router(module)]
        sizes = [_experts(module) + _SUMS for module in modules]
        self._step = torch.zeros(sum(sizes), dtype=torch.float64, device=group.device)
        self._window = torch.zeros_like(self._step)  # since the last line of the journal
        pairs = zip(modules, torch.split(self._step, sizes), strict=True)
        self._routers = [Router(module, counts) for module, counts in pairs]
        self._sizes = sizes
        for router in self._routers:
            router.module.register_forward_hook(_counting(router, strategy))

    def reset(self) -> None:
        """Passes so far counted for nothing."""
        self._step.zero_()
        self._window.zero_()

    @torch.no_grad()
    def stepped(self) -> None:
        """After each step of the optimizer. Where processes step by themselves, each goes by the load it has seen."""
        if not self._routers:
            return
        if self._strategy.lockstep:
            self._add_up(self._step)
        for router in self._routers:
            if self._rate and router.bias is not None and router.trained:
                load = router.counts[:-_SUMS]
                router.bias.add_(torch.sign(load.mean() - load), alpha=self._rate)
        self._window += self._step
        self._step.zero_()

    def told(self) -> dict[str, Any]:
        """For a line of the journal; all take part."""
        if not self._routers:
            return {}
        if not self._strategy.lockstep:
            self._add_up(self._window)
        layers = [counts.tolist() for counts in torch.split(self._window, self._sizes)]
        self._window.zero_()
        return summary(layers)

    def _add_up(self, row: Tensor) -> None:
        if self._group.size > 1:
            dist.all_reduce(row)


def is_router(module: nn.Module) -> bool:
    """As transformers have them: a weight with a row for each expert, and the number it chooses for a token."""
    count, weight = getattr(module, "num_experts", None), getattr(module, "weight", None)
    known = isinstance(count, int) and isinstance(getattr(module, "top_k", None), int)
    return known and isinstance(weight, Tensor) and weight.ndim == 2 and "Router" in type(module).__name__


def summary(layers: list[list[float]]) -> dict[str, Any]:
    """Of each layer: its experts' loads, the entropy summed over tokens, the tokens, and the choices made for them."""
    used = [i for i, layer in enumerate(layers) if layer[-2]]
    if not used:
        return {}
    loads, sums = [layers[i][:-_SUMS] for i in used], [layers[i][-_SUMS:] for i in used]
    peaks = {f"layer_{i}": max(load) * len(load) / max(sum(load), 1) for i, load in zip(used, loads, strict=True)}
    found: dict[str, Any] = {
        "experts": {
            "load_max_over_mean": sum(peaks.values()) / len(peaks),
            "router_entropy": sum(entropy / tokens for entropy, tokens, _ in sums) / len(sums),
            "dropped_tokens": sum(choices for *_, choices in sums) - sum(map(sum, loads)),
        },
        "expert_load_max_over_mean": peaks,
    }
    if sum(map(len, loads)) <= _TOLD:
        found["expert_loads"] = [[int(count) for count in load] for load in loads]
    return found


def _counting(router: Router, strategy: Strategy) -> Callable[..., None]:
    experts = torch.arange(_experts(router.module), device=router.counts.device)
    spread = math.log(max(len(experts), 2))

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        if not (module.training and strategy.counting) or _in_backward():
            return
        logits, _, chosen = (part.detach() for part in output)
        with torch.no_grad():
            scores = logits.float().softmax(-1) if router.bias is None else _shares(logits.float().sigmoid())
            router.counts[:-_SUMS] += (chosen.reshape(-1, 1) == experts).sum(0)
            router.counts[-3] += torch.special.entr(scores).sum(dtype=torch.float64) / spread
            router.counts[-2] += len(logits)
            router.counts[-1] += chosen.numel()

    return hook


def _shares(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def _in_backward() -> bool:
    """A layer that is worked out again there, to save memory, was counted before."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _experts(module: nn.Module) -> int:
    return int(module.num_experts)  # type: ignore[arg-type]
