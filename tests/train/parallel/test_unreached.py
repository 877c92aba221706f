"""Parameters that the loss does not depend on: named before training, and unchanged by it, with every strategy."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.system.errors import ConfigError
from train.checkpoint.store import CheckpointStore
from train.parallel.ddp import DDPStrategy, describe_unreached
from train.process_group import ProcessGroup
from train.state import Progress, local_shard

from ..conftest import equal
from ..distributed import Wave, run_distributed, trainer, weights

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"weight_decay": 0.1},
    "accumulate": {"accumulate": 2},
    "fp16": {"compress": "fp16"},
    "bf16": {"compress": "bf16"},
    "powersgd": {"compress": "powersgd:1"},
    "topk": {"compress": "topk:0.1"},
    "local_sgd": {"strategy": "local_sgd", "sync_every": 2},
    "diloco": {"strategy": "diloco", "sync_every": 2},
    "parameter_server": {"strategy": "parameter_server"},
    "elastic_shards": {"elastic_shards": 2},
    "fsdp": {"strategy": "fsdp"},
    "tensor_parallel": {"tensor_parallel": 2},
    "pipeline_parallel": {"pipeline_parallel": 2, "accumulate": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.fc2(torch.tanh(self.fc1(x)))
        return y


class Pooled(nn.Module):
    """Blocks and a pooler that nothing uses, as in BERT under a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.pooler = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.start(x)
        for block in self.blocks:
            hidden = block(hidden)
        answer: Tensor = self.head(hidden)
        self.pooler(hidden)
        return answer


class PooledWave(Wave):
    def model(self) -> nn.Module:
        return Pooled()


def train_all(group: ProcessGroup, folder: Path) -> dict[str, set[str]]:
    """Return for each strategy the weights that training changed on this process."""
    results: dict[str, set[str]] = {}
    for name, settings in STRATEGIES.items():
        made = trainer(group, PooledWave(), epochs=1, **settings)
        before = {key: local_shard(value).clone() for key, value in made.strategy.weights().items()}
        made.fit(Progress(), CheckpointStore(folder / name, 99, {}, group), None)
        after = made.strategy.weights()
        results[name] = {key for key, value in before.items() if not torch.equal(local_shard(after[key]), value)}
    return results


@pytest.mark.long
def test_every_strategy_trains_all_but_the_unreached_parameters(tmp_path: Path) -> None:
    all_names = {name for name, _ in Pooled().named_parameters()}
    results = run_distributed(train_all, 2, tmp_path)
    for name in STRATEGIES:
        changed = set().union(*(result[name] for result in results))
        unchanged = all_names - changed
        assert {"pooler.weight", "pooler.bias"} >= unchanged, name
        if name != "parameter_server":  # its gradients are one vector, in which a missing one is zero
            assert unchanged == {"pooler.weight", "pooler.bias"}, name


class Noisy(nn.Module):
    """A task with all that another pass could change: running statistics, buffers, and three random generators."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.norm, self.dropout, self.linear = nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1)
        self.pooler = nn.Linear(3, 3) if pooled else nn.Identity()
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        y: Tensor = self.linear(self.dropout(self.norm(x))) + random.random() / 50 + np.random.rand() / 50
        return y + self.passes / 100


class NoisyWave(Wave):
    def __init__(self, pooled: bool) -> None:
        self.pooled = pooled

    def model(self) -> nn.Module:
        return Noisy(self.pooled)


def train_noisy(group: ProcessGroup, folder: Path) -> tuple[list[dict[str, Tensor]], str]:
    """Train with and without the pass that finds missing gradients, and with parameters that have none."""
    results, printed = [], io.StringIO()
    find = DDPStrategy._missing_gradients
    for number, (pooled, finds) in enumerate([(False, True), (False, False), (True, True)]):
        DDPStrategy._missing_gradients = find if finds else lambda *_: []  # type: ignore[method-assign]
        with contextlib.redirect_stdout(printed if pooled else io.StringIO()):
            made = trainer(group, NoisyWave(pooled), epochs=2)
            made.fit(Progress(), CheckpointStore(folder / str(number), 99, {}, group), None)
        results.append({name: tensor for name, tensor in weights(made).items() if "pooler" not in name})
    return results, printed.getvalue()


@pytest.mark.long
def test_search_for_unreached_parameters_changes_no_bit(tmp_path: Path) -> None:
    results = run_distributed(train_noisy, 2, tmp_path)
    for (found, plain, _), _ in results:
        assert equal(found, plain)
    first, second = (printed for _, printed in results)
    assert "does not depend on 2 trained parameters: pooler.bias, pooler.weight" in first
    assert not second


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.first_only = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.first_only(x) if not hasattr(self, "begun") else y


class SometimesWave(Wave):
    def model(self) -> nn.Module:
        return Sometimes()


def train_sometimes(group: ProcessGroup, folder: Path) -> str:
    made = trainer(group, SometimesWave())
    made.strategy.model.begun = torch.ones(())
    try:
        made.fit(Progress(), CheckpointStore(folder, 99, {}, group), None)
    except ConfigError as error:
        return str(error)
    return ""


def test_batch_that_reaches_fewer_parameters_is_explained(tmp_path: Path) -> None:
    for message in run_distributed(train_sometimes, 2, tmp_path):
        assert "that of another batch does not" in message


def test_many_names_are_counted() -> None:
    line = describe_unreached([f"layer.{i}" for i in range(11)])
    assert "11 trained parameters: layer.0, " in line
    assert "layer.7 and 3 more; " in line
