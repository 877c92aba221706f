from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from train.optim import FusedAdamW, Precision, learning_rate, make_optimizer, seed_step

FAULTS = """
import resource, sys, torch
from train.optim import tune_malloc

def step():
    blocks = [torch.ones(300_000) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def faults():
    for _ in range(3):
        step()
    before = step()
    for _ in range(20):
        after = step()
    return (after - before) // 20

default = faults()
if not tune_malloc():
    sys.exit(3)
print(default, faults())
"""


def test_freed_memory_is_reused_by_the_next_step() -> None:
    """Pages the kernel hands out for one step of 24 MB, all freed after it, before and after tune_malloc().

    Whether glibc gives such memory back depends on what else lies in the heap; received so, it always does.
    """
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    argv = [sys.executable, "-c", FAULTS]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 3:
        pytest.skip("the C library cannot be received to keep freed memory")
    assert done.returncode == 0, done.stderr
    default, kept = map(int, done.stdout.split())
    assert kept < 100 < default


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
def test_fused_adamw_matches_torch_bit_for_bit(unused: int) -> None:
    left, right = model(), model()
    lean = steps(left, FusedAdamW(groups(left), fused=True), 5, unused)
    plain = steps(right, torch.optim.AdamW(groups(right), fused=True), 5, unused)
    assert all(torch.equal(*pair) for pair in zip(lean, plain, strict=True))


def test_fused_adamw_continues_from_loaded_state() -> None:
    left, right = model(), model()
    optimizers = FusedAdamW(groups(left), fused=True), torch.optim.AdamW(groups(right), fused=True)
    for of, optimizer in zip((left, right), optimizers, strict=True):
        steps(of, optimizer, 3)
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    lean, plain = (steps(of, optimizer, 3) for of, optimizer in zip((left, right), optimizers, strict=True))
    assert all(torch.equal(*pair) for pair in zip(lean, plain, strict=True))


def test_hooks_are_called_once() -> None:
    made = model()
    optimizer, called = FusedAdamW(groups(made), fused=True), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    steps(made, optimizer, 2)
    assert called == [1, 1]


def test_an_overflow_that_a_scaler_found_changes_nothing() -> None:
    left, right = model(), model()
    optimizers = FusedAdamW(groups(left), fused=True), torch.optim.AdamW(groups(right), fused=True)
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
    assert type(make_optimizer(model(), "adamw", 0.1)) is FusedAdamW


CPU = torch.device("cpu")


def test_resume_keeps_loss_scale_and_overflow_count() -> None:
    first, second = Precision("fp16", CPU), Precision("fp16", CPU)
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(model, "sgd", 0.0)
    first.backward(model(torch.full((1, 2), 1e36)).sum())  # times the loss scale: more than a float holds
    first.unscale(optimizer)
    first.step(optimizer)
    first.overflows += 1
    second.restore(first.state())
    assert second.metrics() == first.metrics() == {"loss_scale": 2.0**15, "overflow_steps": 1}


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_without_fp16_there_is_no_scaler_state(kind: str) -> None:
    made = Precision(kind, CPU)  # type: ignore[arg-type]
    assert made.state() == made.metrics() == {}


def rates(total: int, warmup: float, kind: Literal["cosine", "constant"] = "cosine") -> list[float]:
    return [learning_rate(step, total, peak=2.0, warmup=warmup, kind=kind) for step in range(total)]


def test_it_rises_in_equal_steps_to_the_peak_and_never_starts_at_zero() -> None:
    assert rates(100, 0.04)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_the_cosine_only_falls_after_the_warm_up_and_ends_near_zero() -> None:
    falling = rates(100, 0.1)[10:]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] == 2.0
    assert 0 < falling[-1] < 0.01
    assert falling[45] == pytest.approx(1.0)


def test_a_constant_rate_stays_at_the_peak() -> None:
    assert set(rates(100, 0.1, "constant")[9:]) == {2.0}


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    assert rates(10, 0.0)[0] == 2.0


def test_a_warm_up_over_all_steps_ends_at_the_peak() -> None:
    assert rates(10, 1.0) == pytest.approx([0.2 * i for i in range(1, 11)])


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
def test_a_single_step_is_trained_at_the_peak(kind: Literal["cosine", "constant"], warmup: float) -> None:
    assert rates(1, warmup, kind) == [2.0]


def drawn(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank)
    return random.random(), float(np.random.random()), float(torch.rand(1))


def test_every_generator_draws_the_same_again_after_the_same_place() -> None:
    assert drawn(1, 2, 3) == drawn(1, 2, 3)


def test_seed_step_and_rank_each_draw_something_else() -> None:
    found = [drawn(*place) for place in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (12, 3, 0), (1, 23, 0))]
    for generator in zip(*found, strict=True):
        assert len(set(generator)) == len(found)
