from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.parallel.base import Stopwatch, Traffic
from train.parallel.local_sgd import LocalSGDStrategy, OuterOptimizer
from train.process_group import ProcessGroup

from ..conftest import equal
from ..distributed import resumed, run_distributed, trained, trainer, weights

EPOCHS, STEPS = 5, 50
CASES: dict[str, dict[str, Any]] = {
    "local_sgd": {"strategy": "local_sgd"},
    "local_sgd with overlap": {"strategy": "local_sgd", "sync_overlap": True},
    "diloco": {"strategy": "diloco"},
    "diloco with overlap": {"strategy": "diloco", "sync_overlap": True},
}


def train_cases(group: ProcessGroup, folder: Path) -> dict[str, tuple[float, int, bool, int]]:
    """Return for each case the best loss, bytes sent, whether a resumed run has the same bits, and parameters."""
    LocalSGDStrategy.OUTER_MOMENTUM = 0.3  # high, because there are few steps
    results = {}
    for case, settings in CASES.items():
        settings = {"sync_every": 4, "epochs": EPOCHS, **settings}
        plain, progress = trained(group, folder / case, **settings, checkpoint_every=0)
        saving, _ = trained(group, folder / case, **settings, checkpoint_every=37)
        again, _ = resumed(group, folder / case, 37, **settings)
        assert progress.best_loss is not None
        same = equal(weights(plain), weights(saving)) and equal(weights(plain), weights(again))
        numbers = sum(parameter.numel() for parameter in plain.strategy.model.parameters())
        results[case] = (progress.best_loss, plain.strategy.traffic.sent_bytes, same, numbers)
    return results


@dataclass(frozen=True)
class Results:
    """The results of one process; two processes are started once for all scenarios."""

    runs: dict[str, tuple[float, int, bool, int]]
    local: list[float]
    outer: list[Tensor]
    synced: dict[bool, tuple[dict[str, Tensor], dict[str, Tensor]]]


def run_scenarios(group: ProcessGroup, folder: Path) -> Results:
    synced = {overlap: sync_after_five_steps(group, overlap) for overlap in (False, True)}
    return Results(train_cases(group, folder), local_steps(group), outer_steps(group), synced)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Results]:
    return run_distributed(run_scenarios, 2, folder, seconds=120)


@pytest.mark.parametrize("case", CASES)
def test_run_learns_sends_the_promised_bytes_and_resumes_to_the_same_bits(results: list[Results], case: str) -> None:
    loss, sent, same, numbers = results[0].runs[case]
    assert loss < 0.04  # the targets vary by 0.36
    assert same, "with checkpoints, and resumed in the middle of an exchange"
    exchanges = sum(1 for step in range(1, STEPS + 1) if step % 4 == 0 or step % 10 == 0)
    assert sent == 4 * (exchanges * numbers + EPOCHS * 64)  # and running statistics, once an epoch
    assert results[1].runs[case][:2] == (loss, sent)


@pytest.mark.usefixtures("results")
def test_single_process_resumes_from_the_average(folder: Path) -> None:
    single = trainer(ProcessGroup(Rank(), torch.device("cpu")))
    saved = CheckpointStore(folder / "diloco with overlap", 99, {}).load(37)
    single.restore(saved)
    own = saved.tensors("own.")
    for name, tensor in weights(single).items():
        first, second = (own[f"{rank}.model.{name}"] for rank in (0, 1))
        if tensor.is_floating_point():
            assert not torch.equal(first, second)
            torch.testing.assert_close(tensor, (first + second) / 2)


def test_local_sgd_averages_weights_and_overlap_keeps_later_steps(results: list[Results]) -> None:
    for rank, (at_once, later) in enumerate(result.local for result in results):
        assert at_once == 3.0  # the first went from 1 to 2, the second to 4
        assert later == 3.0 + 10 * (rank + 1)


def local_steps(group: ProcessGroup) -> list[float]:
    collected = []
    for meanwhile in (0.0, 10.0):
        weight = nn.Parameter(torch.tensor([1.0]))
        outer = OuterOptimizer([weight], 1.0, 0.0, *measuring())
        move(weight, 1.0 + 2 * group.rank.rank)
        outer.start()
        move(weight, meanwhile * (group.rank.rank + 1))
        outer.finish()
        collected.append(weight.item())
    return collected


def test_diloco_steps_like_nesterov_sgd_on_the_average(results: list[Results]) -> None:
    """Compare with torch's own optimizer on the average change of both processes."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    expected = []
    for i in range(5):
        weight.grad = -torch.tensor([1.5 + i, -0.5])
        optimizer.step()
        expected.append(weight.detach().clone())
    for result in results:
        torch.testing.assert_close(result.outer, expected)


def outer_steps(group: ProcessGroup) -> list[Tensor]:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    outer = OuterOptimizer([weight], 0.7, 0.9, *measuring())
    collected = []
    for i in range(5):
        move(weight, torch.tensor([1.0 + group.rank.rank + i, -float(group.rank.rank)]))
        outer.start()
        outer.finish()
        collected.append(weight.detach().clone())
    return collected


def measuring() -> tuple[Traffic, Stopwatch]:
    traffic = Traffic()
    return traffic, Stopwatch(torch.device("cpu"), traffic)


def move(weight: Tensor, by: Tensor | float) -> None:
    with torch.no_grad():
        weight.add_(by)


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_equal_for_validation_though_not_before(overlap: bool, results: list[Results]) -> None:
    (apart, after), (other, other_after) = (result.synced[overlap] for result in results)
    assert not equal(apart, other)
    assert equal(after, other_after)


def sync_after_five_steps(group: ProcessGroup, overlap: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    fresh = trainer(group, strategy="local_sgd", sync_every=3, sync_overlap=overlap)
    assert isinstance(fresh.strategy, LocalSGDStrategy)
    for step in range(5):
        fresh._step(step)
    apart = weights(fresh)
    fresh.strategy.sync_weights()
    return apart, weights(fresh)
