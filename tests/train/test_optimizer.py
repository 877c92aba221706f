from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from train.optimizer import LeanAdamW, make_optimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def groups(of: nn.Module) -> list[dict[str, Any]]:
    first, *rest = of.parameters()
    return [{"params": [first], "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def steps(of: nn.Module, optimizer: torch.optim.Optimizer, count: int, unused: int = -1) -> list[Tensor]:
    """Weights after some steps on the same gradients; parameter `unused` gets none in the second."""
    generator = torch.Generator().manual_seed(1)
    for step in range(count):
        for i, parameter in enumerate(of.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step, i) == (1, unused) else gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()
    return [parameter.detach().clone() for parameter in of.parameters()]


@pytest.mark.parametrize("unused", [-1, 0, 2])
def test_the_lean_step_is_torchs_own_to_the_bit(unused: int) -> None:
    left, right = model(), model()
    lean = steps(left, LeanAdamW(groups(left), fused=True), 5, unused)
    plain = steps(right, torch.optim.AdamW(groups(right), fused=True), 5, unused)
    assert all(torch.equal(*pair) for pair in zip(lean, plain, strict=True))


def test_it_goes_on_from_loaded_state_as_torchs_own() -> None:
    left, right = model(), model()
    optimizers = LeanAdamW(groups(left), fused=True), torch.optim.AdamW(groups(right), fused=True)
    for of, optimizer in zip((left, right), optimizers, strict=True):
        steps(of, optimizer, 3)
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    lean, plain = (steps(of, optimizer, 3) for of, optimizer in zip((left, right), optimizers, strict=True))
    assert all(torch.equal(*pair) for pair in zip(lean, plain, strict=True))


def test_hooks_are_called_once() -> None:
    made = model()
    optimizer, called = LeanAdamW(groups(made), fused=True), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    steps(made, optimizer, 2)
    assert called == [1, 1]


def test_an_overflow_that_a_scaler_found_changes_nothing() -> None:
    left, right = model(), model()
    optimizers = LeanAdamW(groups(left), fused=True), torch.optim.AdamW(groups(right), fused=True)
    found = []
    for of, optimizer in zip((left, right), optimizers, strict=True):
        before = steps(of, optimizer, 2)
        optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.tensor(2.0)  # type: ignore[attr-defined]
        assert all(torch.equal(*pair) for pair in zip(steps(of, optimizer, 1), before, strict=True))
        optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        found.append(steps(of, optimizer, 2))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_parameters_of_several_types_are_left_to_torch() -> None:
    mixed = model()
    mixed[2].to(torch.bfloat16)  # type: ignore[index]
    assert type(make_optimizer(mixed, "adamw", 0.1)) is torch.optim.AdamW
    assert type(make_optimizer(model(), "adamw", 0.1)) is LeanAdamW
