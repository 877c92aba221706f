from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.parallel.base import Stopwatch, Traffic
from train.parallel.local_sgd import LocalSGD, OuterOptimizer
from train.process_group import Group

from ..conftest import equal
from ..together import resumed, together, trained, trainer, weights

STEPS = 80  # 8 epochs of 10
WAYS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync": "local_sgd"},
    "local_sgd while computing": {"sync": "local_sgd", "sync_overlap": True},
    "diloco": {"sync": "diloco", "outer_momentum": 0.3},
    "diloco while computing": {"sync": "diloco", "outer_momentum": 0.3, "sync_overlap": True},
}


def test_each_way_learns_sends_what_it_says_and_resumes_to_the_same_bits_in_the_middle_of_an_exchange(
    tmp_path: Path,
) -> None:
    first, second = together(whole_runs, 2, tmp_path)
    for way, (loss, sent, same, numbers) in first.items():
        assert loss < 0.04, (way, loss)  # the targets vary by 0.36
        assert same, way
        exchanges = sum(1 for step in range(1, STEPS + 1) if step % 4 == 0 or step % 10 == 0)
        assert sent == 4 * (exchanges * numbers + 8 * 64), way  # and running statistics, once an epoch
        assert second[way][:2] == (loss, sent)
    without = trainer(Group(Rank(), torch.device("cpu")))
    saved = CheckpointStore(tmp_path / "diloco while computing", 99, {}).load(37)
    without.restore(saved)
    own = saved.whole("own.")
    for name, tensor in weights(without).items():
        held = [own[f"{rank}.model.{name}"] for rank in (0, 1)]
        if tensor.is_floating_point():
            assert not torch.equal(*held)
            torch.testing.assert_close(tensor, (held[0] + held[1]) / 2)


def whole_runs(group: Group, directory: Path) -> dict[str, tuple[float, int, bool, int]]:
    found = {}
    for way, words in WAYS.items():
        words = {"sync_every": 4, **words}
        made, progress = trained(group, directory / way, **words, checkpoint_every=0)
        watched, _ = trained(group, directory / way, **words, checkpoint_every=37)
        again, _ = resumed(group, directory / way, 37, **words)
        assert progress.best_loss is not None
        same = equal(weights(made), weights(watched)) and equal(weights(made), weights(again))
        numbers = sum(parameter.numel() for parameter in made.strategy.model.parameters())
        found[way] = (progress.best_loss, made.strategy.traffic.sent_bytes, same, numbers)
    return found


@dataclass(frozen=True)
class Scenes:
    """What one process saw; two processes play all scenes, since starting them takes longest."""

    local: list[float]
    outer: list[Tensor]
    settled: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]


def play(group: Group) -> Scenes:
    return Scenes(
        local_steps(group), outer_steps(group), {overlap: settled(group, overlap) for overlap in (False, True)}
    )


@pytest.fixture(scope="module")
def scenes() -> list[Scenes]:
    return together(play, 2)


def test_local_sgd_goes_on_from_the_average_and_with_overlap_keeps_the_steps_made_meanwhile(
    scenes: list[Scenes],
) -> None:
    for rank, (at_once, later) in enumerate(scene.local for scene in scenes):
        assert at_once == 3.0  # the first went from 1 to 2, the second to 4
        assert later == 3.0 + 10 * (rank + 1)


def local_steps(group: Group) -> list[float]:
    found = []
    for meanwhile in (0.0, 10.0):
        weight = nn.Parameter(torch.tensor([1.0]))
        outer = OuterOptimizer([weight], 1.0, 0.0, *measuring())
        move(weight, 1.0 + 2 * group.rank.rank)
        outer.start()
        move(weight, meanwhile * (group.rank.rank + 1))
        outer.finish()
        found.append(weight.item())
    return found


def test_diloco_makes_the_steps_of_nesterov_sgd_on_the_average_way(scenes: list[Scenes]) -> None:
    """The same steps by torch's own optimizer, on the average of what both processes moved."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    wanted = []
    for i in range(5):
        weight.grad = -torch.tensor([1.5 + i, -0.5])
        optimizer.step()
        wanted.append(weight.detach().clone())
    for scene in scenes:
        torch.testing.assert_close(scene.outer, wanted)


def outer_steps(group: Group) -> list[Tensor]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    outer = OuterOptimizer([weight], 0.7, 0.9, *measuring())
    found = []
    for i in range(5):
        move(weight, torch.tensor([1.0 + group.rank.rank + i, -float(group.rank.rank)]))
        outer.start()
        outer.finish()
        found.append(weight.detach().clone())
    return found


def measuring() -> tuple[Traffic, Stopwatch]:
    traffic = Traffic()
    return traffic, Stopwatch(torch.device("cpu"), traffic)


def move(weight: Tensor, by: Tensor | float) -> None:
    with torch.no_grad():
        weight.add_(by)


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_the_same_everywhere_when_they_are_judged_though_they_were_not_before(
    overlap: bool, scenes: list[Scenes]
) -> None:
    (apart, after), (other, other_after) = (scene.settled[overlap] for scene in scenes)
    assert not equal(apart, other)
    assert equal(after, other_after)


def settled(group: Group, overlap: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    made = trainer(group, sync="local_sgd", sync_every=3, sync_overlap=overlap)
    assert isinstance(made.strategy, LocalSGD)
    for step in range(5):
        made._step(step)
    apart = weights(made)
    made.strategy.settle()
    return apart, weights(made)
