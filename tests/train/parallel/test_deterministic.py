from __future__ import annotations

import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.errors import ConfigError
from pipeline.contract.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.parallel.deterministic import DeterministicDataParallel, Summing, fold, halves, roots
from train.process_group import Group
from train.state import Progress

from ..together import Wave, together, trainer, weights

WORDS: dict[str, Any] = {"elastic": "exact", "epochs": 2, "batch_size": 30, "log_every": 1}


class Winding(nn.Module):
    """Dropout, batch norm, a buffer that the pass reads and writes, and a layer that only some samples come by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Dropout(0.2))
        self.seldom, self.never = nn.Linear(33, 33), nn.Linear(2, 2)
        self.outer = nn.Linear(33, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.scale, Tensor)
        hidden = self.inner(x) * self.scale.clone()
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * hidden.detach().abs().mean() + 0.05)
        if x[0, 0] > 0.4:
            hidden = hidden + self.seldom(hidden)
        found: Tensor = self.outer(hidden)
        return found


class Wound(Wave):
    def model(self) -> nn.Module:
        return Winding()


class Half(Wave):
    """Parameters of two types, one of them laid out in another order."""

    def model(self) -> nn.Module:
        first = nn.Linear(3, 32)
        first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
        return nn.Sequential(first, nn.Tanh(), _Cast(torch.float64), nn.Linear(32, 1).double(), _Cast(torch.float32))


class _Cast(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.kind)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Wave, {}),
    "micro-batches": (Wave, {"accumulate": 2}),
    "everything that passes may do": (Wound, {}),
    "sgd without clipping": (Wave, {"optimizer": "sgd", "clip_norm": 0.0}),
    "mixed types": (Half, {"optimizer": "sgd"}),
    "bf16": (Wave, {"precision": "bf16"}),
    "fp16": (Wave, {"precision": "fp16"}),
    "six shards": (Wound, {"elastic_shards": 6}),
}


def bits(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Told:
    """A journal that keeps what was said."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def record(self, step: int, epoch: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.losses.append((values["loss"], values["grad_norm"]))


def histories(group: Group, directory: Path) -> dict[str, list[Any]]:
    """For each case everything that must not depend on the number of processes: weights, judgements, losses."""
    found: dict[str, list[Any]] = {}
    for case, (task, words) in CASES.items():
        made, told = trainer(group, task(), **{**WORDS, **words}), Told()
        journal: Any = told if group.rank.first else None
        progress = made.fit(Progress(), CheckpointStore(directory / case, 9, {}, group), journal)
        found[case] = [bits(weights(made)), progress, told.losses]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    (found,) = together(histories, 1, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_number_of_processes_ends_in_the_same_bits(tmp_path: Path, alone: dict[str, list[Any]], size: int) -> None:
    told = together(histories, size, tmp_path)
    for case, (digest, progress, losses) in alone.items():
        for rank, found in enumerate(told):
            assert found[case][0] == digest, f"{case}: weights of rank {rank}"
            assert found[case][1] == progress, f"{case}: what rank {rank} was judged by"
        assert told[0][case][2] == losses, f"{case}: losses and norms of the gradient"
        assert len(losses) == 10


@pytest.mark.long
def test_compiled_too() -> None:
    assert len({together(compiled, size, seconds=300)[0] for size in (1, 2, 3)}) == 1


def compiled(group: Group) -> str:
    made = trainer(group, **WORDS, compile=True)
    for step in range(8):
        made._step(step)
    return bits(weights(made))


def test_another_number_of_shards_or_another_seed_gives_other_bits() -> None:
    """Otherwise the test above could compare what never changes."""
    found = together(variants, 1)[0]
    assert len(set(found)) == len(found)


def variants(group: Group) -> list[str]:
    found = []
    for words in ({}, {"elastic_shards": 3}, {"seed": 1}, {"elastic": "close"}):
        made = trainer(group, Wound(), **{**WORDS, **words})
        for step in range(5):
            made._step(step)
        found.append(bits(weights(made)))
    return found


def test_it_computes_the_gradient_of_the_whole_batch() -> None:
    for exact, plain in together(gradients, 2):
        for name, tensor in exact.items():
            torch.testing.assert_close(tensor, plain[name], rtol=1e-4, atol=1e-6)


class Smooth(Wave):
    """Nothing in it looks at more than one sample."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))


def gradients(group: Group) -> list[dict[str, Tensor]]:
    found = []
    for elastic in ("exact", "close"):
        made = trainer(group, Smooth(), **{**WORDS, "elastic": elastic})
        made.strategy.backward(made._parts(0))
        named = made.strategy.model.named_parameters()
        found.append({name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None})
    return found


def test_a_parameter_that_no_pass_comes_by_is_left_alone_and_one_that_some_come_by_is_not() -> None:
    """Decay would move it, if it had a gradient of zeros."""
    for moved in together(moved_parameters, 3):
        assert {name.partition(".")[0] for name in moved} == {"inner", "seldom", "outer"}


def moved_parameters(group: Group) -> set[str]:
    made = trainer(group, Wound(), **WORDS, weight_decay=0.5)
    before = weights(made)
    for step in range(5):
        made._step(step)
    after = weights(made)
    parameters = {name for name, _ in made.strategy.model.named_parameters()}
    return {name for name in parameters if not torch.equal(before[name], after[name])}


def test_what_travels_are_the_bytes_of_a_ring() -> None:
    """Every process hands over its rows once, and its share of the sum."""
    for size, parts in ((2, 1), (4, 1), (3, 1)):
        sent, numbers = together(traffic, size)[0]
        width = numbers + 10 + 4  # ten parameters, four shards
        assert sent == pytest.approx(4 * (parts * width + width / size), abs=4 * 2 * size)


def traffic(group: Group) -> tuple[int, int]:
    made = trainer(group, **WORDS)
    made._step(0)
    return made.strategy.traffic.sent_bytes, sum(p.numel() for p in made.strategy.model.parameters())


def test_more_processes_than_shards_are_refused() -> None:
    config: Any = trainer(Group(Rank(), torch.device("cpu")), elastic="exact", elastic_shards=2).config
    objective: Any = None
    with pytest.raises(ConfigError, match=r"3 processes for 2 shards .*set train.elastic_shards=3"):
        DeterministicDataParallel(nn.Linear(1, 1), objective, Group(Rank(2, world_size=3), torch.device("cpu")), config)


def test_a_batch_with_fewer_samples_than_shards_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=3 leaves some of 4 shards without work"):
        trainer(Group(Rank(), torch.device("cpu")), elastic="exact", batch_size=3)


def test_a_loss_that_is_not_finite_is_told_with_the_rank_that_has_it() -> None:
    for told in together(with_a_loss_that_breaks, 3):
        assert "the loss is not finite at step 2 on rank 1;" in told


class Breaking(Wave):
    calls = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().loss(outputs, batch) * (float("nan") if self.calls == 3 else 1.0)


def with_a_loss_that_breaks(group: Group) -> str:
    made = trainer(group, Breaking() if group.rank.rank == 1 else None, **WORDS)
    try:
        made.fit(Progress(), CheckpointStore(Path("/nowhere"), 9, {}, group), None)
    except Exception as error:
        return str(error)
    return "no error"


SHARDS, WIDTH = 5, 11  # no number of processes divides them


def rows() -> Tensor:
    """Of numbers so different in size that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHARDS, WIDTH, generator=generator) * 10.0 ** torch.arange(-3, SHARDS - 3)[:, None]


def by_hand(node: range) -> Tensor:
    return fold(node, lambda one: rows()[one.start] if len(one) == 1 else None, Tensor.add)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everybody_gets_the_sum_in_the_order_of_the_tree(size: int) -> None:
    expected = by_hand(range(SHARDS))
    assert not torch.equal(expected, rows().flip(0).cumsum(0)[-1]), "the order matters"
    for first, second in together(summed, size):
        assert torch.equal(first, expected)
        assert torch.equal(second, expected)


def summed(group: Group) -> list[Tensor]:
    """Twice, since the rows are used again."""
    summing = Summing(group, SHARDS, WIDTH, torch.float32)
    found = []
    for _ in range(2):
        for row, node in zip(summing.rows, summing.mine, strict=True):
            row[:WIDTH] = by_hand(node)
        summing.exchange()
        found.append(summing.total[:WIDTH].clone())
    return found


def written(node: range, known: dict[range, str]) -> str:
    return fold(node, known.get, lambda left, right: f"({left}+{right})")


def leaves(count: int) -> dict[range, str]:
    return {range(i, i + 1): str(i) for i in range(count)}


def test_four_shards_are_added_in_pairs() -> None:
    assert written(range(4), leaves(4)) == "((0+1)+(2+3))"
    assert written(range(3), leaves(3)) == "(0+(1+2))"
    assert written(range(1), leaves(1)) == "0"


@pytest.mark.parametrize("shards", range(1, 13))
def test_however_the_shards_are_held_their_sum_is_written_the_same_way(shards: int) -> None:
    whole = written(range(shards), leaves(shards))
    for size in range(1, shards + 1):
        parts: dict[range, str] = {}
        for rank in range(size):
            held = Rank(rank, world_size=size).slice_of(shards)
            mine = roots(range(shards), held)
            assert list(itertools.chain(*mine)) == list(held)
            assert len(mine) <= 2 * max(1, math.ceil(math.log2(len(held) + 1)))
            parts |= {node: written(node, leaves(shards)) for node in mine}
        assert written(range(shards), parts) == whole


def test_a_process_that_holds_a_whole_half_tells_one_sum() -> None:
    assert roots(range(4), range(2)) == [range(2)]
    assert roots(range(4), range(1, 3)) == [range(1, 2), range(2, 3)]
    assert roots(range(4), range(4)) == [range(4)]
    assert roots(range(8), range(2, 8)) == [range(2, 4), range(4, 8)]


def test_a_path_is_finished_before_the_next_is_begun() -> None:
    """So that memory holds one sum for each level, not one for each shard."""
    order: list[str] = []

    def known(node: range) -> str | None:
        if len(node) > 1:
            return None
        order.append(f"shard {node.start}")
        return str(node.start)

    def add(left: str, right: str) -> str:
        order.append(f"{left} and {right}")
        return f"{left}{right}"

    fold(range(4), known, add)
    assert order == ["shard 0", "shard 1", "0 and 1", "shard 2", "shard 3", "2 and 3", "01 and 23"]


@pytest.mark.parametrize("count", range(2, 20))
def test_halves_are_all_of_it(count: int) -> None:
    left, right = halves(range(3, 3 + count))
    assert [*left, *right] == list(range(3, 3 + count))
    assert left
    assert right
