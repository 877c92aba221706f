from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.settings.stages import Train
from train.optim import Precision
from train.parallel import make_strategy
from train.parallel.base import Objective, Part
from train.parallel.compression import power_of_two_below, shrinks
from train.process_group import Group

from ..conftest import equal
from ..together import resumed, together, trained, weights

KINDS = ("fp16", "bf16", "powersgd", "topk")


class Task:
    inputs = ("x",)
    outputs = ("y",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs * batch["target"]).mean()  # linear: the gradient is as large as the targets


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))


NUMBERS = 40 * 30 + 30 + 30 * 20 + 20


def parts(rank: int, size: float = 1.0) -> list[Part]:
    """Five samples for the first process, three for the second, in two micro-batches each."""
    draw = torch.Generator().manual_seed(rank)
    found, mine = [], 5 - 2 * rank
    for i, count in enumerate((mine - 1, 1)):
        x, target = torch.randn(count, 40, generator=draw), size * torch.randn(count, 20, generator=draw)
        found.append(Part({"x": x, "target": target}, count, count / 8, last=i == 1))
    return found


def flat(gradients: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in gradients.parameters() if p.grad is not None])


def exact(size: float = 1.0) -> Tensor:
    """The gradient one process finds on the samples of both."""
    alone = model()
    for part in (*parts(0, size), *parts(1, size)):
        (Task().loss(alone(part.batch["x"]), dict(part.batch)) * part.share).backward()  # type: ignore[no-untyped-call]
    return flat(alone)


def strategy_of(group: Group, **words: Any) -> Any:
    objective = Objective(Task(), Precision(words.get("precision", "fp32"), group.device))  # type: ignore[arg-type]
    made = make_strategy(model(), objective, group, Train(**words))
    made.warm_up(lambda: parts(group.rank.rank))
    return made


def gradients_of_both(group: Group, cases: list[dict[str, Any]], size: float, steps: int) -> list[tuple[Tensor, int]]:
    """For each case the sum of the gradients of some equal steps, and the bytes one step has sent."""
    found = []
    for words in cases:
        made = strategy_of(group, **words)
        total = torch.zeros(NUMBERS)
        for _ in range(steps):
            made.model.zero_grad(set_to_none=True)
            made.backward(parts(group.rank.rank, size))
            total += flat(made.model)
        found.append((total, made.traffic.sent_bytes // steps))
    return found


CASES: list[dict[str, Any]] = [
    {"compress": "none"},
    {"compress": "fp16"},
    {"compress": "bf16"},
    {"compress": "powersgd", "compress_rank": 1},
    {"compress": "topk", "compress_share": 0.05},
    {"compress": "topk", "compress_share": 0.05, "bucket_mb": 0.001},
    {"compress": "powersgd", "compress_rank": 1, "bucket_mb": 0.001},
    {"compress": "fp16", "bucket_mb": 0.001},
    {"compress": "powersgd", "compress_rank": 3, "static_graph": True},
]
STEPS = 60
SIZES = (1e9, 1e-9)


@dataclass(frozen=True)
class Scenes:
    """What one process saw; two processes play all scenes, since starting them takes longest."""

    cases: list[tuple[Tensor, int]]
    sizes: dict[float, Tensor]
    scaled: list[list[Tensor]]


def play(group: Group) -> Scenes:
    sizes = {size: gradients_of_both(group, [{"compress": "fp16"}], size, 1)[0][0] for size in SIZES}
    return Scenes(gradients_of_both(group, CASES, 1.0, STEPS), sizes, scaled_gradients(group, ("topk", "powersgd")))


@pytest.fixture(scope="module")
def scenes() -> list[Scenes]:
    return together(play, 2)


def test_every_packing_gives_all_processes_the_same_gradient_near_the_exact_one_for_the_bytes_it_promises(
    scenes: list[Scenes],
) -> None:
    """With feedback, what one step could not send comes with the next ones, so sums over steps are near as well."""
    first, second = (scene.cases for scene in scenes)
    wanted = exact() * STEPS
    sent = []
    for case, (one, bytes_of_one), (other, bytes_of_other) in zip(CASES, first, second, strict=True):
        assert torch.equal(one, other), case
        assert bytes_of_one == bytes_of_other
        error = float((one - wanted).norm() / wanted.norm())
        assert error < {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2}.get(case["compress"], 0.2), (case, error)
        sent.append(bytes_of_one)
    assert sent[:3] == [4 * NUMBERS, 2 * NUMBERS + 4, 2 * NUMBERS]
    assert sent[3] == 4 * ((40 + 30) + (30 + 20) + 30 + 20)  # two thin matrices for each, biases as they are
    assert sent[4] == 8 * math.ceil(0.05 * NUMBERS)
    assert sent[7] == 2 * NUMBERS + 2 * 4, "each layer is a bucket with a factor of its own"


def test_fp16_packs_gradients_that_are_beyond_its_range_and_below_it(scenes: list[Scenes]) -> None:
    for size, gradient in scenes[0].sizes.items():
        assert float((gradient - exact(size)).norm() / exact(size).norm()) < 1e-3


def test_an_overflow_and_another_loss_scale_leave_the_remainders_what_they_are(scenes: list[Scenes]) -> None:
    for scene in scenes:
        for plain, overflown, other_scale, without_remainder in scene.scaled:
            assert torch.equal(plain, overflown)
            assert float((plain - other_scale).norm() / plain.norm()) < 0.01
            assert float((plain - without_remainder).norm() / plain.norm()) > 0.1, "remainders matter here"


def scaled_gradients(group: Group, kinds: tuple[str, ...]) -> list[list[Tensor]]:
    """The second gradient, plainly, after an overflow on the other process, on another scale, and as a first one."""
    found: list[list[Tensor]] = []
    for kind in kinds:
        found.append([])
        for sizes, scale in (((1.0, 1.0), 64.0), ((1.0, math.inf, 1.0), 64.0), ((1.0, 1.0), 32.0), ((1.0,), 64.0)):
            made = strategy_of(group, compress=kind, precision="fp16", compress_share=0.1, compress_rank=1)
            scaler = made.objective.precision.scaler
            scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})
            for i, size in enumerate(sizes):
                if i == len(sizes) - 1:
                    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
                made.model.zero_grad(set_to_none=True)
                made.backward(parts(group.rank.rank, size if group.rank.rank == 1 else 1.0))
                assert flat(made.model).isfinite().all() == math.isfinite(size), "everybody sees an overflow"
            found[-1].append(flat(made.model) / scale)
    return found


def test_packed_runs_learn_what_plain_ones_do_and_resume_to_the_same_bits(tmp_path: Path) -> None:
    losses, _ = together(whole_runs, 2, tmp_path)
    assert max(losses.values()) < losses["none"] + 0.02 < 0.04, losses  # the targets vary by 0.36


def whole_runs(group: Group, directory: Path) -> dict[str, float]:
    losses: dict[str, float] = {}
    for kind in ("none", *KINDS):
        words: dict[str, Any] = {"compress": kind, "compress_rank": 1, "compress_share": 0.1, "checkpoint_every": 7}
        made, progress = trained(group, directory / kind, **words)
        assert progress.best_loss is not None
        losses[kind] = progress.best_loss
        again, _ = resumed(group, directory / kind, 49, **words)
        assert equal(weights(again), weights(made)), kind
    return losses


@pytest.mark.parametrize(("largest", "scaled"), [(1.0, 2.0**14), (0.99, 0.99 * 2**15), (3e9, 3e9 / 2**17), (0.0, 0.0)])
def test_the_factor_of_fp16_is_a_power_of_two_that_leaves_room_below_the_largest_number(
    largest: float, scaled: float
) -> None:
    assert float(torch.tensor(largest) * power_of_two_below(torch.tensor(largest))) == pytest.approx(scaled)


def test_the_factor_of_what_is_not_finite_is_one() -> None:
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
def test_only_matrices_that_become_less_than_half_are_packed_as_products(
    shape: tuple[int, ...], rank: int, smaller: bool
) -> None:
    assert shrinks(torch.zeros(shape), rank) == smaller
