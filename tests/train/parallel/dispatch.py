"""Experts of transformers by themselves, whole and cut over two processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from train.parallel.experts import cut_experts, find_experts

from .mixture import Language

CHOSEN = {
    "all over": [[0, 3], [1, 2], [3, 1]],
    "one process has nothing to do": [[0, 1], [1, 0], [0, 1]],
}
Values = list[Tensor]


def dispatched(axis: str, implementation: str) -> dict[str, tuple[Values, Values]]:
    """For each choice what is found and what is expected: answers, and gradients of tokens, weights and experts."""
    torch.manual_seed(0)
    model = Language("DeepseekV3")
    model.inner.set_experts_implementation(implementation)
    (whole,) = find_experts(model).values()
    cut = copy.deepcopy(whole)
    shape = (2, 1) if axis == "expert" else (1, 2)
    cut_experts(cut, init_device_mesh("cpu", shape, mesh_dim_names=("expert", "tensor")))
    assert [len(part.to_local()) for part in cut.parameters() if isinstance(part, DTensor)] == [2, 2]
    return {name: (_pass(cut, chosen), _pass(whole, chosen)) for name, chosen in CHOSEN.items()}


def _pass(module: nn.Module, chosen: list[list[int]]) -> Values:
    torch.manual_seed(1)
    tokens = torch.randn(3, 32, requires_grad=True)
    shares = torch.rand(3, 2, requires_grad=True)
    answers: Tensor = module(tokens, torch.tensor(chosen), shares)
    module.zero_grad()
    torch.autograd.backward((answers * torch.arange(96.0).view(3, 32).cos()).sum())
    gradients: list[Any] = [tokens.grad, shares.grad, *(parameter.grad for parameter in module.parameters())]
    whole = [found.full_tensor() if isinstance(found, DTensor) else found for found in gradients]
    return [answers.detach(), *whole]
