"""Random weights: shards with the bits of the whole model, without memory for the rest of it."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from train.optim import seed_step
from train.pretrained.random_weights import RandomWeights, SparseBuild, create_split
from train.process_group import ProcessGroup
from train.state import local_shard

from ..distributed import Wave, run_distributed, trainer

SIDE = mmap.PAGESIZE // 4  # so that a row of float32 is one page
SEED = partial(seed_step, 0, -1, 0)
SINGLE = ProcessGroup(Rank(0, 0, 1), torch.device("cpu"))
CPU = torch.device("cpu")


class Wide(Wave):
    """The same with layers that are larger than a page, and random numbers that are no parameters."""

    def model(self) -> nn.Module:
        layers = (nn.Linear(3, SIDE), nn.Tanh(), nn.Linear(SIDE, 64), nn.Tanh(), nn.Linear(64, 2), nn.Linear(2, 1))
        model = nn.Sequential(*layers)
        model.register_buffer("noise", torch.rand(3))
        nn.init.trunc_normal_(layers[2].weight, std=0.02)
        return model


class Layer(nn.Module):
    """A matrix whose values come from `fill`, between two others."""

    def __init__(self, fill: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(3, SIDE))
        self.matrix = nn.Parameter(torch.empty(8, SIDE))
        self.after = nn.Embedding(6, SIDE, padding_idx=2)
        with torch.no_grad():
            fill(self.matrix)
        self.table = torch.rand(3)


def _normalize_twice(matrix: Tensor) -> None:
    nn.init.normal_(matrix)
    matrix.mul_(0.5).add_(1.0)
    matrix[3].zero_()


FILLS: dict[str, Callable[[Tensor], object]] = {
    "normal": nn.init.normal_,
    "truncated": nn.init.trunc_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": partial(nn.init.sparse_, sparsity=0.5),
    "in several steps": _normalize_twice,
    "copied": lambda matrix: matrix.copy_(torch.rand(8, SIDE)),
    "zeros": nn.init.zeros_,
}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_shard_has_the_bits_of_the_whole_and_no_memory_for_the_rest(fill: Callable[[Tensor], object]) -> None:
    SEED()
    whole = Layer(fill)
    SEED()
    rows = ((2, 5), (0, SIDE))
    with SparseBuild({1: rows}, resident_bytes=0) as build:
        sparse = Layer(fill)
    assert not build.problem
    assert torch.equal(sparse.matrix[2:5], whole.matrix[2:5])
    assert torch.equal(sparse.table, whole.table)
    for lost in (sparse.before, sparse.after.weight, sparse.matrix[[0, 1, 5, 6, 7]]):
        assert (lost == 0).float().mean() > 0.5, "all but the pages that are shared with something else"


def test_columns_of_rows_are_kept() -> None:
    SEED()
    whole = nn.Linear(4 * SIDE, 5)
    SEED()
    with SparseBuild({0: ((1, 4), (SIDE, 3 * SIDE))}, resident_bytes=0):
        sparse = nn.Linear(4 * SIDE, 5)
    assert torch.equal(sparse.weight[1:4, SIDE : 3 * SIDE], whole.weight[1:4, SIDE : 3 * SIDE])
    assert (sparse.weight[0] == 0).float().mean() > 0.5


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "operation": lambda weight: weight,
    "numpy": lambda weight: torch.from_numpy(weight.numpy().copy()),
    "list": lambda weight: torch.tensor(weight.tolist()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_initialization_that_reads_weights_is_whole(
    read: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> nn.Module:
        first, second = nn.Linear(SIDE, 4), nn.Linear(SIDE, 4)
        second.weight.data.copy_(read(first.weight.data))
        return nn.Sequential(first, second)

    SEED()
    model, materializer = create_split(build, SEED, SINGLE, resumes=False, resident_bytes=0)
    assert materializer is None
    assert "each process initializes the whole model" in capsys.readouterr().out
    SEED()
    for parameter, expected in zip(model.parameters(), build().parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_small_model_is_built_once_and_whole() -> None:
    builds: list[nn.Module] = []

    def build() -> nn.Module:
        builds.append(Wide().model())
        return builds[-1]

    assert create_split(build, SEED, SINGLE, resumes=False) == (builds[0], None)
    assert len(builds) == 1


def test_model_that_changes_between_builds_is_refused() -> None:
    sizes = iter((SIDE, SIDE + 1))
    model, materializer = create_split(lambda: nn.Linear(next(sizes), 2), SEED, SINGLE, resumes=False, resident_bytes=0)
    assert isinstance(materializer, RandomWeights)
    with pytest.raises(ConfigError, match="must build the same one every time"):
        materializer.materialize(model, CPU)


def initial_weights(group: ProcessGroup, folder: Path) -> dict[str, list[tuple[str, Tensor, Tensor]]]:
    """Return each weight of a split model by strategy: its name, its values, and those of the whole model."""
    ways: dict[str, dict[str, Any]] = {
        "fsdp": {"strategy": "fsdp"},
        "tensor": {"tensor_parallel": 2},
        "pipeline": {"pipeline_parallel": 2, "accumulate": 2},
    }
    weights = {}
    for name, settings in ways.items():
        SEED()
        whole = Wide().model().state_dict()
        build = partial(create_split, Wide().model, SEED, group, resumes=False, resident_bytes=0)
        strategy = trainer(group, Wide(), build=build, **settings).strategy
        weights[name] = [
            (key, (value.full_tensor() if isinstance(value, DTensor) else value).clone(), whole[key])
            for key, value in strategy.weights().items()
        ]
    return weights


def test_split_model_begins_with_the_bits_of_the_whole(tmp_path: Path) -> None:
    by_rank = run_distributed(initial_weights, 2, tmp_path)
    for name in by_rank[0]:
        weights = [weight for found in by_rank for weight in found[name]]
        assert {key for key, _, _ in weights} == set(Wide().model().state_dict()), name
        for key, actual, expected in weights:
            assert torch.equal(actual, expected), f"{name}: {key}"


def _large() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))]
    return nn.Sequential(nn.Linear(3, 1024), *layers, nn.Linear(1024, 1))


def peak_of_initialization(group: ProcessGroup, folder: Path) -> tuple[float, float]:
    """Return by how much the memory of this process grew while its shard was initialized, and what the shard takes."""
    clear, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    build = partial(create_split, _large, SEED, group, resumes=False, resident_bytes=16 << 20)
    trainer(group, Wave(), strategy="fsdp")  # so that all modules are loaded
    clear.write_text("5")
    before = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    model = trainer(group, Wave(), build=build, strategy="fsdp").strategy.model
    after = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return (after - before) / 2**10, sum(local_shard(parameter).nbytes for parameter in model.parameters()) / 2**20


def test_initialization_takes_the_memory_of_a_shard(tmp_path: Path) -> None:
    for grown, shard in run_distributed(peak_of_initialization, 2, tmp_path):
        assert shard > 120
        assert grown < 1.2 * shard + 48, "two matrices, and what is not yet given back"
