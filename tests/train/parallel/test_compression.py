from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from train.optim import Precision
from train.parallel import make_strategy
from train.parallel.base import MicroBatch, Objective
from train.parallel.compression import is_worth_factoring, power_of_two_below
from train.parallel.ddp import DDPStrategy
from train.process_group import ProcessGroup

from ..conftest import equal
from ..distributed import resumed, run_distributed, trained, weights


class Task:
    inputs = ("x",)
    outputs = ("y",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs * batch["target"]).mean()  # linear: the gradient is as large as the targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


NUMBERS = 40 * 30 + 30 + 30 * 20 + 20


def micro_batches(rank: int, size: float = 1.0) -> list[MicroBatch]:
    """Five samples for the first process, three for the second, in two micro-batches each."""
    draw = torch.Generator().manual_seed(rank)
    collected, mine = [], 5 - 2 * rank
    for i, count in enumerate((mine - 1, 1)):
        x, target = torch.randn(count, 40, generator=draw), size * torch.randn(count, 20, generator=draw)
        collected.append(MicroBatch({"x": x, "target": target}, count, count / 8, last=i == 1))
    return collected


def flat(gradients: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in gradients.parameters() if p.grad is not None])


def exact(size: float = 1.0) -> Tensor:
    """Return the gradient of a single process on the samples of both."""
    alone = model()
    for micro_batch in (*micro_batches(0, size), *micro_batches(1, size)):
        (Task().loss(alone(micro_batch.columns["x"]), dict(micro_batch.columns)) * micro_batch.fraction).backward()  # type: ignore[no-untyped-call]
    return flat(alone)


def make_warm_strategy(group: ProcessGroup, bucket_mb: float = 0, **settings: Any) -> Any:
    DDPStrategy.BUCKET_CAP_MB = bucket_mb
    objective = Objective(Task(), Precision(settings.get("precision", "fp32"), group.device))  # type: ignore[arg-type]
    strategy = make_strategy(model(), objective, group, Train(**settings))
    strategy.warm_up(lambda: micro_batches(group.rank.rank))
    return strategy


def gradients_of_both(
    group: ProcessGroup, cases: list[dict[str, Any]], size: float, steps: int
) -> list[tuple[Tensor, int]]:
    """Return for each case the sum of gradients over some equal steps, and the bytes sent per step."""
    collected = []
    for settings in cases:
        strategy = make_warm_strategy(group, **settings)
        total = torch.zeros(NUMBERS)
        for _ in range(steps):
            strategy.model.zero_grad(set_to_none=True)
            strategy.compute_gradient(micro_batches(group.rank.rank, size))
            total += flat(strategy.model)
        collected.append((total, strategy.traffic.sent_bytes // steps))
    return collected


CASES: list[dict[str, Any]] = [
    {"compress": "none"},
    {"compress": "fp16"},
    {"compress": "bf16"},
    {"compress": "powersgd:1"},
    {"compress": "topk:0.05"},
    {"compress": "topk:0.05", "bucket_mb": 0.001},
    {"compress": "powersgd:1", "bucket_mb": 0.001},
    {"compress": "fp16", "bucket_mb": 0.001},
    {"compress": "powersgd:3"},
]
STEPS = 60
SIZES = (1e9, 1e-9)


@dataclass(frozen=True)
class Results:
    """The results of one process; two processes are started once for all scenarios."""

    cases: list[tuple[Tensor, int]]
    sizes: dict[float, Tensor]
    scaled: list[list[Tensor]]
    losses: dict[str, float]
    collectives: list[str]


def fp16_collectives(group: ProcessGroup) -> list[str]:
    """Return in their order the collectives of a step with two buckets."""
    strategy, begun = make_warm_strategy(group, bucket_mb=0.001, compress="fp16"), list[str]()
    all_reduce = dist.all_reduce

    def record(tensor: Tensor, *arguments: Any, **settings: Any) -> Any:
        begun.append(("agree" if tensor.numel() == 1 else "send") + ("" if settings.get("async_op") else ", blocking"))
        return all_reduce(tensor, *arguments, **settings)

    with patch.object(dist, "all_reduce", record):
        strategy.compute_gradient(micro_batches(group.rank.rank))
    return begun


def run_scenarios(group: ProcessGroup, folder: Path) -> Results:
    sizes = {size: gradients_of_both(group, [{"compress": "fp16"}], size, 1)[0][0] for size in SIZES}
    scaled = scaled_gradients(group, ("topk:0.1", "powersgd:1"))
    losses = train_and_resume(group, folder)
    return Results(gradients_of_both(group, CASES, 1.0, STEPS), sizes, scaled, losses, fp16_collectives(group))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_distributed(run_scenarios, 2, tmp_path_factory.mktemp("runs"), seconds=120)


def test_compressors_average_gradients_and_send_the_promised_bytes(results: list[Results]) -> None:
    """With error feedback later steps send what one step could not, so sums over steps are close, too."""
    first, second = (result.cases for result in results)
    wanted = exact() * STEPS
    sent = []
    for case, (one, bytes_of_one), (other, bytes_of_other) in zip(CASES, first, second, strict=True):
        assert torch.equal(one, other), case
        assert bytes_of_one == bytes_of_other
        error = float((one - wanted).norm() / wanted.norm())
        assert error < {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2}.get(case["compress"], 0.2), (case, error)
        sent.append(bytes_of_one)
    assert sent[:3] == [4 * NUMBERS, 2 * NUMBERS + 4, 2 * NUMBERS]
    assert sent[3] == 4 * ((40 + 30) + (30 + 20) + 30 + 20)  # two thin factors for each matrix, biases whole
    assert sent[4] == 8 * math.ceil(0.05 * NUMBERS)
    assert sent[7] == 2 * NUMBERS + 2 * 4, "each layer is a bucket with its own factor"


def test_fp16_scales_very_large_and_very_small_gradients(results: list[Results]) -> None:
    for size, gradient in results[0].sizes.items():
        assert float((gradient - exact(size)).norm() / exact(size).norm()) < 1e-3


def test_fp16_blocks_nothing_while_further_gradients_are_computed(results: list[Results]) -> None:
    """The second bucket is ready and its number is being agreed on before the first one is sent."""
    for result in results:
        assert result.collectives == ["agree", "agree", "send", "send"]


def test_overflow_and_new_loss_scale_keep_remainders(results: list[Results]) -> None:
    for result in results:
        for plain, overflown, other_scale, without_remainder in result.scaled:
            assert torch.equal(plain, overflown)
            assert float((plain - other_scale).norm() / plain.norm()) < 0.01
            assert float((plain - without_remainder).norm() / plain.norm()) > 0.1, "remainders matter here"


def scaled_gradients(group: ProcessGroup, kinds: tuple[str, ...]) -> list[list[Tensor]]:
    """Return the second gradient: plain, after an overflow on the other process, with another scale, and as first."""
    collected: list[list[Tensor]] = []
    for kind in kinds:
        collected.append([])
        for sizes, scale in (((1.0, 1.0), 64.0), ((1.0, math.inf, 1.0), 64.0), ((1.0, 1.0), 32.0), ((1.0,), 64.0)):
            strategy = make_warm_strategy(group, compress=kind, precision="fp16")
            scaler = strategy.objective.precision.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
            for i, size in enumerate(sizes):
                if i == len(sizes) - 1:
                    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
                strategy.model.zero_grad(set_to_none=True)
                strategy.compute_gradient(micro_batches(group.rank.rank, size if group.rank.rank == 1 else 1.0))
                assert flat(strategy.model).isfinite().all() == math.isfinite(size), "all processes see an overflow"
            collected[-1].append(flat(strategy.model) / scale)
    return collected


def test_compressed_runs_learn_and_resume_to_the_same_bits(results: list[Results]) -> None:
    losses = results[0].losses
    assert max(losses.values()) < losses["none"] + 0.02 < 0.04, losses  # the targets vary by 0.36


def train_and_resume(group: ProcessGroup, folder: Path) -> dict[str, float]:
    losses: dict[str, float] = {}
    for compress in ("none", "fp16", "bf16", "powersgd:1", "topk:0.1"):
        settings: dict[str, Any] = {"compress": compress, "checkpoint_every": 7, "epochs": 5}
        result, progress = trained(group, folder / compress, **settings)
        assert progress.best_loss is not None
        losses[compress] = progress.best_loss
        again, _ = resumed(group, folder / compress, 35, **settings)
        assert equal(weights(again), weights(result)), compress
    return losses


@pytest.mark.parametrize(("largest", "scaled"), [(1.0, 2.0**14), (0.99, 0.99 * 2**15), (3e9, 3e9 / 2**17), (0.0, 0.0)])
def test_fp16_factor_is_a_power_of_two_below_the_limit(largest: float, scaled: float) -> None:
    assert float(torch.tensor(largest) * power_of_two_below(torch.tensor(largest))) == pytest.approx(scaled)


def test_fp16_factor_is_one_if_not_finite() -> None:
    assert power_of_two_below(torch.tensor(math.inf)) == 1


@pytest.mark.parametrize(
    ("shape", "rank", "smaller"),
    [
        ((100,), 1, False),
        ((10, 10), 2, True),
        ((10, 10), 3, False),
        ((64, 8, 3, 3), 4, True),
        ((64, 1, 3, 3), 8, False),
    ],
)
def test_only_matrices_that_shrink_to_half_are_factored(shape: tuple[int, ...], rank: int, smaller: bool) -> None:
    assert is_worth_factoring(torch.zeros(shape), rank) == smaller
