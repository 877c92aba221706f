"""Activation checkpointing: the same gradients with less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from train.checkpoint.store import CheckpointStore
from train.parallel.blocks import recompute_blocks
from train.process_group import ProcessGroup

from .distributed import run_distributed, trained
from .parallel.mixture import LanguageModel
from .parallel.transformer import Llama, Tiny

ONE = ProcessGroup(Rank(), torch.device("cpu"))
CASES: dict[str, dict[str, Any]] = {
    "one": {"processes": 1},
    "ddp": {"accumulate": 2},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2, "accumulate": 2},
    "elastic": {"elastic_shards": 4},
}


class NoisyTiny(Tiny):
    def model(self) -> nn.Module:
        model = Llama()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        return model


def gradients(model: nn.Module, tokens: Tensor) -> tuple[list[Tensor], int]:
    """Return the gradients, and the bytes that autograd keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens).square().mean()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], sum(sizes.values())


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3", "AdaptedLlama"])
def test_blocks_are_computed_again_with_the_same_gradients(kind: str) -> None:
    results = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = NoisyTiny().model() if kind == "Llama" else LanguageModel(kind)
        if recomputes:
            recompute_blocks(model)
        results.append((list(model.state_dict()), *gradients(model.train(), torch.randint(0, 11, (16, 6)))))
    (names, expected, kept), (same_names, again, less) = results
    assert names == same_names
    assert len(expected) == len(again) and all(map(torch.equal, expected, again))
    assert less < 0.6 * kept


def test_running_statistics_are_updated_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    recompute_blocks(model)
    model(torch.randn(4, 2)).sum().backward()
    assert model[1].num_batches_tracked == 1


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no repeated blocks"):
        recompute_blocks(nn.Linear(2, 1))


def train_in_all(group: ProcessGroup, folder: Path) -> None:
    for name, settings in CASES.items():
        for recompute in ("none", "blocks"):
            if name != "one" or group.rank.first:
                path = folder / f"{name} {recompute}"
                trained(
                    ONE if name == "one" else group, path, task=NoisyTiny(), epochs=1, recompute=recompute, **settings
                )


@pytest.mark.long
def test_every_strategy_trains_the_same_bits_with_recomputation(tmp_path: Path) -> None:
    run_distributed(train_in_all, 2, tmp_path)
    for name in CASES:
        none, blocks = (CheckpointStore(tmp_path / f"{name} {kind}", 9, {}) for kind in ("none", "blocks"))
        assert none.steps() == blocks.steps() != []
        expected, weights = (store.load(none.steps()[-1]).tensors("") for store in (none, blocks))
        assert expected.keys() == weights.keys()
        assert all(torch.equal(expected[key], weights[key]) for key in expected), name
