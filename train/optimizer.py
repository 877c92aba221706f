"""The optimizer by its word in the configuration; one fused kernel for all parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)
    plain = all(type(parameter) is nn.Parameter for parameters in rows.values() for parameter in parameters)
    one_kind = len({(p.dtype, p.device) for parameters in rows.values() for p in parameters}) == 1
    return (LeanAdamW if plain and one_kind else torch.optim.AdamW)(groups, lr=0.0, fused=True)


class LeanAdamW(torch.optim.AdamW):
    """AdamW for parameters of one type on one device: the same kernel, without sorting them at every step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if closure is not None or self._has_more_to_do():
            super().step(closure)
            return
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            state = [self.state[parameter] for parameter in trained]
            steps = [entry["step"] for entry in state]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                trained,
                [parameter.grad for parameter in trained],
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
            )

    def _has_more_to_do(self) -> bool:
        """Whether torch's own step has work that ours leaves out: state to make, a loss scale, hooks."""
        count = sum(len(group["params"]) for group in self.param_groups)
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return len(self.state) < count or bool(hooked) or getattr(self, "found_inf", None) is not None
