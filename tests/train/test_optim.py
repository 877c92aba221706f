from __future__ import annotations

import copy
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import (
    FusedAdamW,
    Precision,
    check_optimizer_state,
    learning_rate,
    make_optimizer,
    seed_step,
    set_learning_rate,
)
from train.process_group import ProcessGroup

from .distributed import resumed, run_distributed, trained
from .parallel.transformer import Tiny

ONE = ProcessGroup(Rank(), torch.device("cpu"))
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
    """Compare page faults of a step that allocates and frees 24 MB before and after tune_malloc().

    The environment variable makes glibc always return such memory, whatever else is in the heap.
    """
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    argv = [sys.executable, "-c", FAULTS]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 3:
        pytest.skip("the C library has no setting to keep freed memory")
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
    """Return the weights after steps on fixed gradients; parameter `unused` gets none in the second step."""
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


def test_overflow_skips_the_fused_update() -> None:
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
    assert type(make_optimizer(mixed, Train())) is torch.optim.AdamW
    assert type(make_optimizer(model(), Train())) is FusedAdamW


CPU = torch.device("cpu")


def test_resume_keeps_loss_scale_and_overflow_count() -> None:
    first, second = Precision("fp16", CPU), Precision("fp16", CPU)
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(model, Train(optimizer="sgd", weight_decay=0))
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


def rates(total: int, warmup: float, kind: str = "cosine", **settings: float) -> list[float]:
    train = Train.model_validate({"lr": 2.0, "warmup_ratio": warmup, "schedule": kind, **settings})
    return [learning_rate(step, total, train) for step in range(total)]


def test_warm_up_is_linear_and_starts_above_zero() -> None:
    assert rates(100, 0.04)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


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


def test_generators_repeat_for_the_same_seed_step_and_rank() -> None:
    assert drawn(1, 2, 3) == drawn(1, 2, 3)


def test_generators_differ_by_seed_step_and_rank() -> None:
    found = [drawn(*place) for place in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (12, 3, 0), (1, 23, 0))]
    for generator in zip(*found, strict=True):
        assert len(set(generator)) == len(found)


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("cosine", "get_cosine_schedule_with_warmup", {}),
        ("linear", "get_linear_schedule_with_warmup", {}),
        ("cosine", "get_cosine_with_min_lr_schedule_with_warmup", {"min_lr_rate": 0.1}),
        ("wsd", "get_wsd_schedule", {"num_decay_steps": 20, "decay_type": "linear", "min_lr_ratio": 0.1}),
        ("wsd", "get_wsd_schedule", {"num_decay_steps": 30, "decay_type": "linear"}),
    ],
)
def test_schedules_are_those_of_transformers(kind: str, name: str, options: dict[str, Any]) -> None:
    """Except during warm-up, which starts at zero there."""
    schedules = importlib.import_module("transformers.optimization")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    steps = {"num_training_steps": 100, **options}
    scheduler = getattr(schedules, name)(optimizer, num_warmup_steps=10, **steps)
    expected = []
    for _ in range(100):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    floor = options.get("min_lr_rate", options.get("min_lr_ratio", 0.0))
    decay = {"decay_ratio": options["num_decay_steps"] / 100} if kind == "wsd" else {}
    assert rates(100, 0.1, kind, min_lr_ratio=floor, **decay)[9:] == pytest.approx([2.0, *expected[10:]])


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    torch.manual_seed(0)
    made: Any = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 5))
    optimizer = make_optimizer(made, Train(optimizer="muon", lr=0.01, momentum=0.5, betas=(0.8, 0.9)))
    assert [tuple(p.shape) for p in optimizer.param_groups[0]["params"]] == [(6, 4), (6, 6)]
    assert optimizer.param_groups[0]["momentum"] == 0.5
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups[1:])
    before = made[3].weight.detach().clone()
    made(torch.arange(5)).square().sum().backward()
    set_learning_rate(optimizer, 0.02)
    optimizer.step()
    change = (made[3].weight.detach() - before * (1 - 0.02 * 0.01)) / 0.02
    assert float(change.square().mean().sqrt()) == pytest.approx(0.2, rel=0.25), "as large as AdamW's"
    singular = torch.linalg.svdvals(change)
    assert float(singular.max() / singular.min()) < 5, "nearly orthogonal"
    assert set(optimizer.state) == set(made.parameters())


class OwnOptimizer:
    """A task with an optimizer of its own; only what make_optimizer needs."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def optimizer(self, model: nn.Module, settings: Train) -> Any:
        return self._make(model, settings)


def test_schedule_scales_the_rate_of_each_group_of_the_tasks_optimizer() -> None:
    def make(model: nn.Module, settings: Train) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups: list[dict[str, Any]] = [{"params": [first], "lr": settings.lr / 10}, {"params": rest}]
        return torch.optim.RMSprop(groups, lr=settings.lr)

    optimizer = make_optimizer(model(), Train(lr=0.5), OwnOptimizer(make))
    set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01, 0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *_: "adam", "must return a torch.optim.Optimizer, not str"),
        (lambda model, _: torch.optim.LBFGS(model.parameters()), "computes the loss several times"),
        (lambda model, _: torch.optim.SGD([model[0].weight]), "leaves out 3 trained parameters, such as 0.bias"),
    ],
)
def test_optimizer_that_cannot_be_used_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_optimizer(model(), Train(), OwnOptimizer(make))


def test_optimizer_state_that_no_checkpoint_can_contain_is_refused() -> None:
    made: Any = model()
    optimizer = torch.optim.SGD(made.parameters())
    optimizer.state[made[0].weight]["count"] = 3
    with pytest.raises(ConfigError, match="the state `count` of SGD is no tensor"):
        check_optimizer_state(optimizer)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "betas": [0.9, 0.95]},
        {"momentum": 0.8},
        {"schedule": "constant", "min_lr_ratio": 0.1},
        {"decay_ratio": 0.3},
        {"schedule": "wsd", "decay_ratio": 0.5, "warmup_ratio": 0.6},
        {"optimizer": "muon", "strategy": "fsdp"},
        {"optimizer": "muon", "tensor_parallel": 2},
    ],
)
def test_settings_of_the_optimizer_without_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Train.model_validate(settings)


class NesterovTiny(Tiny):
    def optimizer(self, model: nn.Module, settings: Train) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.8, nesterov=True)


CASES: dict[str, dict[str, Any]] = {
    "ddp": {"optimizer": "muon"},
    "elastic": {"optimizer": "muon", "elastic_shards": 4},
    "pipeline": {"optimizer": "muon", "pipeline_parallel": 2, "accumulate": 2},
    "parameter server": {"optimizer": "muon", "strategy": "parameter_server"},
    "own fsdp": {"strategy": "fsdp", "task": NesterovTiny()},
}


def train_in_two(group: ProcessGroup, folder: Path) -> None:
    for name, settings in CASES.items():
        words = {"epochs": 1, "batch_size": 9, "checkpoint_every": 2, "clip_norm": 0, **settings}
        trained(group, folder / name, **{"task": Tiny(), **words})
        if name == "own fsdp":
            shutil.copytree(folder / name, folder / name / str(group.rank.rank))
            resumed(group, folder / name, 2, **words)
        if group.rank.first:
            alone = {"strategy": "ddp", "pipeline_parallel": 1, "accumulate": 1}
            trained(ONE, folder / f"{name} alone", **{"task": Tiny(), **words, **alone})


def test_optimizers_give_the_weights_of_one_process(tmp_path: Path) -> None:
    run_distributed(train_in_two, 2, tmp_path)
    for name in CASES:
        two, one = (CheckpointStore(tmp_path / case, 9, {}).load(5).tensors("") for case in (name, f"{name} alone"))
        if name in ("ddp", "pipeline"):  # Muon rounds to bf16, to one value or the next
            assert two.keys() == one.keys()
            for key in (key for key in two if key.startswith("weights.")):
                assert (two[key] - one[key]).norm() <= 0.01 * one[key].norm(), key
        elif name != "parameter server":  # its gradients may be old
            torch.testing.assert_close(two, one, rtol=0, atol=0 if name == "elastic" else 1e-6)
    whole, after_resume = (
        CheckpointStore(path, 9, {}) for path in (tmp_path / "own fsdp" / "0", tmp_path / "own fsdp")
    )
    torch.testing.assert_close(after_resume.load(5).tensors(""), whole.load(5).tensors(""), rtol=0, atol=0)
