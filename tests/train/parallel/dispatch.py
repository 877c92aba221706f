"""Experts of transformers by themselves, whole and split over two processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from train.parallel.experts import find_experts, shard_experts

from .mixture import LanguageModel

ROUTINGS = {"all over": [[0, 3], [1, 2], [3, 1]], "one process has nothing to do": [[0, 1], [1, 0], [0, 1]]}
Values = list[Tensor]


def dispatched(axis: str, implementation: str) -> dict[str, tuple[Values, Values]]:
    """Return split and whole results for each routing: outputs, and gradients of tokens, weights and experts."""
    torch.manual_seed(0)
    model = LanguageModel("DeepseekV3")
    model.inner.set_experts_implementation(implementation)
    (whole,) = find_experts(model).values()
    split = copy.deepcopy(whole)
    shape = (2, 1) if axis == "expert" else (1, 2)
    shard_experts(split, init_device_mesh("cpu", shape, mesh_dim_names=("expert", "tensor")))
    assert [len(part.to_local()) for part in split.parameters() if isinstance(part, DTensor)] == [2, 2]
    return {name: (_pass(split, chosen), _pass(whole, chosen)) for name, chosen in ROUTINGS.items()}


def _pass(module: nn.Module, chosen: list[list[int]]) -> Values:
    torch.manual_seed(1)
    tokens = torch.randn(3, 32, requires_grad=True)
    routing_weights = torch.rand(3, 2, requires_grad=True)
    outputs: Tensor = module(tokens, torch.tensor(chosen), routing_weights)
    module.zero_grad()
    torch.autograd.backward((outputs * torch.arange(96.0).view(3, 32).cos()).sum())
    gradients: list[Any] = [tokens.grad, routing_weights.grad, *(parameter.grad for parameter in module.parameters())]
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return [outputs.detach(), *whole]
