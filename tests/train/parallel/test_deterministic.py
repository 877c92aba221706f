"""The same bits with any number of processes. Processes are started once per number and run all scenarios."""

from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.system.errors import ConfigError, DataError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.parallel.deterministic import DeterministicAllReduce, DeterministicStrategy, covering_nodes, tree_sum
from train.process_group import ProcessGroup
from train.state import Progress

from ..distributed import Wave, run_distributed, trainer, weights

SETTINGS: dict[str, Any] = {"elastic_shards": 4, "epochs": 2, "batch_size": 30, "log_every": 1}


class Irregular(nn.Module):
    """Dropout, batch norm, a buffer that the pass reads and writes, and a layer that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Dropout(0.2))
        self.sometimes, self.never = nn.Linear(33, 33), nn.Linear(2, 2)
        self.outer = nn.Linear(33, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        hidden = self.inner(x) * self.scale.clone()
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * hidden.detach().abs().mean() + 0.05)
        if x[0, 0] > 0.4:
            hidden = hidden + self.sometimes(hidden)
        output: Tensor = self.outer(hidden)
        return output


class IrregularTask(Wave):
    def model(self) -> nn.Module:
        return Irregular()


class MixedTypes(Wave):
    """Parameters of two types, one of them with another memory layout."""

    def model(self) -> nn.Module:
        first = nn.Linear(3, 32)
        first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
        return nn.Sequential(first, nn.Tanh(), _Cast(torch.float64), nn.Linear(32, 1).double(), _Cast(torch.float32))


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Smooth(Wave):
    """Every sample is computed independently."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))


class BreakingLoss(Wave):
    calls = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().loss(outputs, batch) * (float("nan") if self.calls == 3 else 1.0)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Wave, {}),
    "micro-batches": (Wave, {"accumulate": 2}),
    "irregular": (IrregularTask, {}),
    "sgd without clipping": (Wave, {"optimizer": "sgd", "clip_norm": 0.0}),
    "mixed types": (MixedTypes, {"optimizer": "sgd"}),
    "bf16": (Wave, {"precision": "bf16"}),
    "fp16": (Wave, {"precision": "fp16"}),
    "six shards": (IrregularTask, {"elastic_shards": 6}),
}


def digest(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Recorder:
    """A metrics log in memory."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def record(self, step: int, epoch: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append((values["loss"], values["grad_norm"]))


def train_cases(group: ProcessGroup, folder: Path) -> dict[str, tuple[str, Progress, list[tuple[float, float]]]]:
    """Return for each case what must not depend on the number of processes: weights, progress, losses."""
    results = {}
    for case, (task, settings) in CASES.items():
        fresh, recorder = trainer(group, task(), **{**SETTINGS, **settings}), Recorder()
        log: Any = recorder if group.rank.first else None
        progress = fresh.fit(Progress(), CheckpointStore(folder / case, 9, {}, group), log)
        results[case] = digest(weights(fresh)), progress, recorder.losses
    return results


def weights_after_steps(group: ProcessGroup, steps: int, task: Any = None, **settings: Any) -> str:
    fresh = trainer(group, task, **{**SETTINGS, **settings})
    for step in range(steps):
        fresh._step(step)
    return digest(weights(fresh))


def gradients(group: ProcessGroup, shards: int) -> dict[str, Tensor]:
    fresh = trainer(group, Smooth(), **{**SETTINGS, "elastic_shards": shards})
    fresh.strategy.compute_gradient(fresh._micro_batches(0))
    named = fresh.strategy.model.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


def changed_parameters(group: ProcessGroup) -> set[str]:
    fresh = trainer(group, IrregularTask(), **SETTINGS, weight_decay=0.5)
    before = weights(fresh)
    for step in range(5):
        fresh._step(step)
    after = weights(fresh)
    parameters = {name for name, _ in fresh.strategy.model.named_parameters()}
    return {name for name in parameters if not torch.equal(before[name], after[name])}


def traffic(group: ProcessGroup) -> tuple[int, int]:
    fresh = trainer(group, **SETTINGS)
    fresh._step(0)
    return fresh.strategy.traffic.sent_bytes, sum(p.numel() for p in fresh.strategy.model.parameters())


SHARDS, WIDTH = 5, 11  # no number of processes divides them


def shard_rows() -> Tensor:
    """Return numbers so different in size that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHARDS, WIDTH, generator=generator) * 10.0 ** torch.arange(-3, SHARDS - 3)[:, None]


def sum_by_hand(node: range) -> Tensor:
    return tree_sum(node, lambda part: shard_rows()[part.start] if len(part) == 1 else None, Tensor.add)


def all_reduce_twice(group: ProcessGroup) -> list[Tensor]:
    """Twice, since the buffers are used again."""
    reduction = DeterministicAllReduce(group, SHARDS, WIDTH, torch.float32)
    totals = []
    for _ in range(2):
        for row, node in zip(reduction.rows, reduction.own_nodes, strict=True):
            row[:WIDTH] = sum_by_hand(node)
        reduction.all_reduce()
        totals.append(reduction.total[:WIDTH].clone())
    return totals


def break_the_loss(group: ProcessGroup) -> str:
    fresh = trainer(group, BreakingLoss() if group.rank.rank == 1 else None, **SETTINGS)
    with pytest.raises(DataError) as caught:
        fresh.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    return str(caught.value)


def run_scenarios(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"cases": train_cases(group, folder)}
    if group.size == 1:
        settings: list[dict[str, Any]] = [{}, {"elastic_shards": 3}, {"seed": 1}, {"elastic_shards": 0}]
        return results | {"variants": [weights_after_steps(group, 5, IrregularTask(), **each) for each in settings]}
    results |= {"traffic": traffic(group), "totals": all_reduce_twice(group)}
    if group.size == 2:
        results["gradients"] = gradients(group, 4), gradients(group, 0)
    if group.size == 3:
        results |= {"changed": changed_parameters(group), "broken loss": break_the_loss(group)}
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The results of all processes, by their number."""
    sizes = (1, 2, 3, 4)
    return {size: run_distributed(run_scenarios, size, tmp_path_factory.mktemp("run"), seconds=240) for size in sizes}


Results = dict[int, list[dict[str, Any]]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.long
def test_any_number_of_processes_trains_the_same_bits(results: Results, size: int) -> None:
    for case, (weights_digest, progress, losses) in results[1][0]["cases"].items():
        for rank, result in enumerate(results[size]):
            assert result["cases"][case][0] == weights_digest, f"{case}: weights of rank {rank}"
            assert result["cases"][case][1] == progress, f"{case}: validation on rank {rank}"
        assert results[size][0]["cases"][case][2] == losses, f"{case}: losses and gradient norms"
        assert len(losses) == 10


@pytest.mark.long
def test_other_shards_or_seed_give_other_bits(results: Results) -> None:
    """Otherwise the test above could compare what never changes."""
    variants = results[1][0]["variants"]
    assert len(set(variants)) == len(variants)


@pytest.mark.long
def test_compiled_model_trains_the_same_bits() -> None:
    assert len({run_distributed(compiled, size, seconds=300)[0] for size in (1, 2, 3)}) == 1


def compiled(group: ProcessGroup) -> str:
    return weights_after_steps(group, 8, compile=True)


@pytest.mark.long
def test_gradient_is_that_of_the_whole_batch(results: Results) -> None:
    for result in results[2]:
        sharded, plain = result["gradients"]
        for name, tensor in sharded.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_only_parameters_that_some_shard_uses_are_updated(results: Results) -> None:
    """Weight decay would change a parameter with a gradient of zeros."""
    for result in results[3]:
        assert {name.partition(".")[0] for name in result["changed"]} == {"inner", "sometimes", "outer"}


@pytest.mark.parametrize(("size", "rows"), [(2, 1), (4, 1), (3, 1)])
@pytest.mark.long
def test_all_reduce_sends_as_many_bytes_as_a_ring(results: Results, size: int, rows: int) -> None:
    """Each process sends its rows once, and its slice of the sum."""
    sent, numbers = results[size][0]["traffic"]
    width = numbers + 10 + 4  # ten parameters, four shards
    assert sent == pytest.approx(4 * (rows * width + width / size), abs=4 * 2 * size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.long
def test_all_reduce_adds_in_the_order_of_the_tree(results: Results, size: int) -> None:
    expected = sum_by_hand(range(SHARDS))
    assert not torch.equal(expected, shard_rows().flip(0).cumsum(0)[-1]), "the order matters"
    for result in results[size]:
        for total in result["totals"]:
            assert torch.equal(total, expected)


@pytest.mark.long
def test_loss_that_is_not_finite_is_reported_with_its_rank(results: Results) -> None:
    for result in results[3]:
        assert "the loss is not finite at step 3 on rank 1;" in result["broken loss"]


def test_more_processes_than_shards_are_refused() -> None:
    config: Any = trainer(ProcessGroup(Rank(), torch.device("cpu")), elastic_shards=2).config
    objective: Any = None
    with pytest.raises(ConfigError, match=r"elastic_shards=2: 3 processes .*set train.elastic_shards=3"):
        DeterministicStrategy(
            nn.Linear(1, 1), objective, ProcessGroup(Rank(2, world_size=3), torch.device("cpu")), config
        )


def test_batch_smaller_than_the_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=3 leaves some of 4 shards without work"):
        trainer(ProcessGroup(Rank(), torch.device("cpu")), elastic_shards=4, batch_size=3)


def formula(node: range, lookup: dict[range, str]) -> str:
    return tree_sum(node, lookup.get, lambda left, right: f"({left}+{right})")


def leaves(count: int) -> dict[range, str]:
    return {range(i, i + 1): str(i) for i in range(count)}


def test_shards_are_added_in_pairs() -> None:
    assert formula(range(4), leaves(4)) == "((0+1)+(2+3))"
    assert formula(range(3), leaves(3)) == "(0+(1+2))"
    assert formula(range(1), leaves(1)) == "0"


@pytest.mark.parametrize("shards", range(1, 13))
def test_sum_does_not_depend_on_which_process_has_which_shards(shards: int) -> None:
    whole = formula(range(shards), leaves(shards))
    for size in range(1, shards + 1):
        parts: dict[range, str] = {}
        for rank in range(size):
            own = Rank(rank, world_size=size).slice_of(shards)
            nodes = covering_nodes(range(shards), own)
            assert list(itertools.chain(*nodes)) == list(own)
            assert len(nodes) <= 2 * max(1, math.ceil(math.log2(len(own) + 1)))
            parts |= {node: formula(node, leaves(shards)) for node in nodes}
        assert formula(range(shards), parts) == whole


def test_shards_are_covered_by_the_largest_nodes() -> None:
    assert covering_nodes(range(4), range(2)) == [range(2)]
    assert covering_nodes(range(4), range(1, 3)) == [range(1, 2), range(2, 3)]
    assert covering_nodes(range(4), range(4)) == [range(4)]
    assert covering_nodes(range(8), range(2, 8)) == [range(2, 4), range(4, 8)]


def test_left_half_is_summed_before_the_right_one_starts() -> None:
    """So that memory holds one sum for each level, not one for each shard."""
    order: list[str] = []

    def lookup(node: range) -> str | None:
        if len(node) > 1:
            return None
        order.append(f"shard {node.start}")
        return str(node.start)

    def add(left: str, right: str) -> str:
        order.append(f"{left} and {right}")
        return f"{left}{right}"

    tree_sum(range(4), lookup, add)
    assert order == ["shard 0", "shard 1", "0 and 1", "shard 2", "shard 3", "2 and 3", "01 and 23"]
