"""The optimizer by its word in the configuration; one fused kernel for all parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def make_optimizer(model: nn.Module, kind: str, weight_decay: float) -> torch.optim.Optimizer:
    """Biases and norms, the parameters of one axis, are not decayed."""
    rows: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = getattr(parameter, "device_mesh", None)  # a kernel takes what is cut the same way, or not at all
            rows.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
        for (decayed, _), parameters in sorted(rows.items(), key=lambda row: not row[0][0])
    ]
    plain = all(type(parameter) is nn.Parameter for parameters in rows.values() for parameter in parameters)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=plain)  # torch has no fused one for what is cut
    one_kind = len({(p.dtype, p.device) for parameters in rows.values() for p in parameters}) == 1
    return (LeanAdamW if plain and one_kind else torch.optim.AdamW)(groups, lr=0.0, fused=True)


class LeanAdamW(torch.optim.AdamW):
    """AdamW for parameters of one type on one device: the same kernel, without sorting them at every step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                self._update(group, trained, [self.state[parameter] or self._begin(parameter) for parameter in trained])

    def _begin(self, parameter: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros((), device=parameter.device, dtype=torch.float32)}
        state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = state
        return state

    def _update(self, group: dict[str, Any], trained: list[Tensor], state: list[dict[str, Tensor]]) -> None:
        steps = [entry["step"] for entry in state]
        overflow = getattr(self, "found_inf", None)  # left by a GradScaler: then nothing is changed
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            trained,
            [parameter.grad for parameter in trained if parameter.grad is not None],
            [entry["exp_avg"] for entry in state],
            [entry["exp_avg_sq"] for entry in state],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=overflow,
        )
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))
