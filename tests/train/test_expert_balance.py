from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.expert_balance import ExpertBalance, is_router, load_summary

from .parallel.mixture import single


class TinyRouter(nn.Module):
    """Chooses the two experts with the largest numbers."""

    def __init__(self, biased: bool = True) -> None:
        super().__init__()
        self.num_experts, self.top_k = 4, 2
        self.weight = nn.Parameter(torch.eye(4))
        if biased:
            self.register_buffer("e_score_correction_bias", torch.zeros(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = tokens @ self.weight.T
        weights, chosen = logits.topk(2)
        return logits, weights, chosen


def routing(model: nn.Module, **more: Any) -> tuple[Any, ExpertBalance]:
    strategy: Any = SimpleNamespace(module=model, counts_samples=True, lockstep=True, **more)
    return strategy, ExpertBalance(strategy, single())


TOKENS = torch.tensor([[4.0, 3.0, 1.0, 0.0], [4.0, 3.0, 1.0, 0.0], [4.0, 1.0, 3.0, 0.0]])


def test_loads_entropy_and_bias_follow_what_the_router_chose() -> None:
    router = TinyRouter()
    _, found = routing(router)
    router(TOKENS)
    found.after_update()
    assert dict(router.named_buffers())["e_score_correction_bias"].tolist() == pytest.approx(
        [-0.001, -0.001, 0.001, 0.001]
    )
    received = found.metrics()
    assert received["expert_loads"] == [[3, 2, 1, 0]]
    assert received["expert_load_max_over_mean"] == {"layer_0": 2.0}
    shares = TOKENS[0].sigmoid() / TOKENS[0].sigmoid().sum()
    entropy = -float((shares * shares.log()).sum()) / math.log(4)
    assert received["experts"] == pytest.approx(
        {"load_max_over_mean": 2.0, "router_entropy": entropy, "dropped_tokens": 0.0}
    )
    assert found.metrics() == {}  # no step since


def test_a_choice_without_an_expert_counts_as_dropped() -> None:
    assert load_summary([[3.0, 2.0, 1.5, 3.0, 6.0]])["experts"]["dropped_tokens"] == 1.0


@pytest.mark.parametrize("what", ["frozen", "no bias"])
def test_bias_of_a_frozen_router_does_not_change(what: str) -> None:
    router = TinyRouter(biased=what != "no bias").requires_grad_(what != "frozen")
    _, found = routing(router)
    router(TOKENS)
    found.after_update()
    assert all(not buffer.any() for buffer in router.buffers())
    assert found.metrics()["expert_loads"] == [[3, 2, 1, 0]]


def test_validation_and_recomputed_passes_are_not_counted() -> None:
    router = TinyRouter()
    strategy, found = routing(router)
    router.eval()(TOKENS)
    router.train()
    strategy.counts_samples = False
    router(TOKENS)
    strategy.counts_samples = True
    logits, *_ = checkpoint(router, TOKENS.clone().requires_grad_(), use_reentrant=False)
    logits.sum().backward()
    found.after_update()
    assert found.metrics()["expert_loads"] == [[3, 2, 1, 0]]


def test_many_experts_are_reported_by_layer_only() -> None:
    layer = [1.0] * 600 + [10.0, 20.0, 600.0]
    assert "expert_loads" in load_summary([layer])
    assert load_summary([layer, layer]).keys() == {"experts", "expert_load_max_over_mean"}


def test_a_layer_that_never_ran_is_left_out() -> None:
    received = load_summary([[0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.5, 2.0, 4.0]])
    assert received["expert_load_max_over_mean"] == {"layer_1": 1.5}
    assert received["expert_loads"] == [[3, 1]]


def test_the_count_is_traced_by_a_compiler() -> None:
    model = nn.Sequential(TinyRouter())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    _, found = routing(compiled)  # type: ignore[arg-type]  # published as a function
    compiled(TOKENS)
    found.after_update()
    assert found.metrics()["expert_loads"] == [[3, 2, 1, 0]]


def test_a_model_without_routers_shows_nothing() -> None:
    assert not is_router(nn.Linear(4, 4))
    _, found = routing(nn.Linear(4, 4))
    found.after_update()
    assert found.metrics() == {}
