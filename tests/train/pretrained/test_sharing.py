"""Pretrained weights on several real processes: each reads only the shards that it keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.contract.pretrained import open_pretrained
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.parallel.pipeline_split import TemporaryWeights
from train.parallel.placeholder import Placeholder
from train.pretrained.load import PretrainedModel, load_from_files
from train.process_group import ProcessGroup
from train.state import Progress, local_shard

from ..distributed import Wave, run_distributed, trainer
from .folders import Tower, tower_state, write_folder


class PretrainedTask(Wave):
    def model(self) -> nn.Module:
        raise AssertionError("a pretrained model is not built by model()")


class Result(NamedTuple):
    """The result of one process."""

    initial: dict[str, Tensor]  # whole weights before training
    trained: dict[str, Tensor]  # and after an epoch
    bytes_read: int  # from the files
    parameter_bytes: int  # in its memory


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2, "accumulate": 4},
}


def train_with_every_strategy(group: ProcessGroup, folder: Path) -> dict[str, Result]:
    return {name: train(group, folder, settings) for name, settings in STRATEGIES.items()}


def train(group: ProcessGroup, folder: Path, settings: dict[str, Any]) -> Result:
    built: list[PretrainedModel] = []
    pretrained = open_pretrained(folder)

    def build() -> PretrainedModel:
        built.append(load_from_files(Tower, pretrained, ("extra.*",), partial(seed_step, 0, -1, 0)))
        return built[0]

    made = trainer(group, PretrainedTask(), build=build, epochs=1, batch_size=50, **settings)
    initial = own_weights(made.strategy.model)
    parameter_bytes = sum(local_shard(p).numel() * p.element_size() for p in made.strategy.model.parameters())
    bytes_read = built[0].materializer.read.bytes
    made.fit(Progress(), CheckpointStore(folder / "-".join(["checkpoints", *settings]), 1, {}, group), None)
    return Result(initial, own_weights(made.strategy.model), bytes_read, parameter_bytes)


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights, but none of other stages."""
    state = {name: tensor for name, tensor in model.state_dict().items() if not isinstance(tensor, Placeholder)}
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("weights") / "tower", tower_state(), shards=3)


@pytest.fixture(scope="module")
def single(folder: Path) -> Result:
    """The result of a single process."""
    return train(ProcessGroup(Rank(), CPU), folder, {})


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Result]]:
    """The results of two processes with every strategy: starting them takes longer than training."""
    return run_distributed(train_with_every_strategy, 2, folder)


def tower_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in Tower().parameters())


BUFFER_BYTES = 8 * 4
CPU = torch.device("cpu")


def test_fsdp_process_reads_only_its_shards(ranks: list[dict[str, Result]]) -> None:
    found = [one["fsdp"] for one in ranks]
    assert [one.bytes_read - BUFFER_BYTES for one in found] == [one.parameter_bytes for one in found]
    assert sum(one.parameter_bytes for one in found) == tower_bytes()


@pytest.mark.long
def test_split_and_sharded_layers_equal_those_of_one_process(folder: Path, single: Result) -> None:
    """The whole model is run before it is split, one block at a time."""
    found = run_distributed(train, 4, folder, {"strategy": "fsdp", "tensor_parallel": 2})
    assert_same_as_single(found, single)
    assert max(one.parameter_bytes for one in found) < tower_bytes() / 2


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor"])
def test_training_starts_from_the_weights_of_the_files(
    ranks: list[dict[str, Result]], single: Result, name: str
) -> None:
    assert_same_as_single([one[name] for one in ranks], single)


def test_stage_has_only_its_own_layers(ranks: list[dict[str, Result]], single: Result) -> None:
    first, last = (one["pipeline"] for one in ranks)
    assert_equal({**first.initial, **last.initial}, tower_state())
    assert first.initial.keys() & last.initial.keys() == {"shift"}
    for one in (first, last):
        assert one.trained.keys() == one.initial.keys()
        expected = {name: single.trained[name] for name in one.trained}
        torch.testing.assert_close(one.trained, expected, rtol=1e-4, atol=1e-5)


def test_temporary_weights_exist_one_block_at_a_time(folder: Path) -> None:
    model, materializer = load_from_files(Tower, open_pretrained(folder), (), lambda: None)
    layers, materialized = list(model.get_submodule("layers").children()), list[list[bool]]()
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda *_: materialized.append([not p.is_meta for other in layers for p in other.parameters()])
        )
    with TemporaryWeights(materializer, CPU).during_forward(model):
        output, offset = model(torch.ones(2, 3)), model.get_parameter("offset")
        gradient = torch.autograd.grad(output.sum(), offset)
    assert [sum(now) for now in materialized] == [6, 6, 6, 6], "of 24 weights only those of one block"
    assert all(p.is_meta for p in model.parameters())
    materializer.materialize(model, CPU)
    whole = model(torch.ones(2, 3))
    assert torch.equal(output, whole)
    assert torch.equal(*gradient, *torch.autograd.grad(whole.sum(), model.get_parameter("offset")))


def assert_same_as_single(found: list[Result], single: Result) -> None:
    for one in found:
        assert_equal(one.initial, tower_state())
        torch.testing.assert_close(one.trained, single.trained, rtol=1e-4, atol=1e-5)


def assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected[name]), name
