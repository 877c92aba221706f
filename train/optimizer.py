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
    return torch.optim.AdamW(groups, lr=0.0, fused=True)
