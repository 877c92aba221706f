"""The optimizer by its word in the configuration; one fused kernel for all parameters."""

from __future__ import annotations

import torch
from torch import nn


def make_optimizer(model: nn.Module, kind: str, weight_decay: float) -> torch.optim.Optimizer:
    """Biases and norms, the parameters of one axis, are not decayed."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.9, fused=True)
    return torch.optim.AdamW(groups, lr=0.0, fused=True)
