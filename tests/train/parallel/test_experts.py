"""Which layers and experts are split, tested without processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError
from pipeline.system.processes import Rank
from train.parallel.experts import check_experts, find_experts
from train.parallel.tensor_parallel import base_linear, find_pairs, parallel_styles
from train.process_group import join_process_group

from .mixture import LanguageModel


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)


def adapted(**words: Any) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    model: nn.Module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["fc1", "fc2"], **words), Mlp())
    return model


def test_attention_and_mlp_of_an_adapted_model_are_split() -> None:
    pairs = find_pairs(LanguageModel("AdaptedLlama"), 2)
    assert [pair.columns[0].rpartition(".")[2] for pair in pairs] == ["q_proj", "gate_proj"] * 2


def test_lora_matrix_on_the_split_side_is_split() -> None:
    model = adapted()
    first, second = (
        parallel_styles(name, model.get_submodule(name), by_outputs=name == "fc1") for name in ("fc1", "fc2")
    )
    assert {name: type(style) for name, style in (first | second).items()} == {
        "fc1.base_layer": ColwiseParallel,
        "fc1.lora_B.default": ColwiseParallel,
        "fc2.base_layer": RowwiseParallel,
        "fc2.lora_A.default": RowwiseParallel,
    }


@pytest.mark.parametrize("words", [{"use_dora": True}, {"lora_bias": True}])
def test_adapter_that_needs_the_whole_layer_is_not_split(words: dict[str, Any]) -> None:
    assert base_linear(adapted().get_submodule("fc1")) is not None
    assert base_linear(adapted(**words).get_submodule("fc1")) is None


class Experts(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 8, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("never called")


class Others(Experts):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError("never called")


def test_experts_are_found_by_parameters_and_arguments() -> None:
    model = nn.ModuleDict({"mixture": Experts(), "other": Others(), "plain": nn.Linear(4, 4)})
    assert list(find_experts(model)) == ["mixture"]


@pytest.mark.parametrize(
    ("expert", "tensor", "message"),
    [
        (4, 1, "4 processes cannot share the 6 experts of mixture; use numbers whose product divides 6"),
        (2, 2, "train.expert_parallel=2 x train.tensor_parallel=2: 4 processes cannot share the 6 experts"),
        (1, 4, "train.tensor_parallel=4: 4 processes cannot share the 6 experts"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(expert: int, tensor: int, message: str) -> None:
    check_experts({"mixture": Experts()}, 3, 2)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_experts({"mixture": Experts()}, expert, tensor)


def test_model_without_experts_is_refused() -> None:
    check_experts({}, 1, 2)
    with pytest.raises(ConfigError, match=r"train\.expert_parallel=2: the model has no layer of experts"):
        check_experts({}, 2, 1)


EXPERTS = "expert_parallel=4: 4 processes cannot be divided evenly; to fix it, make train.processes a multiple of 8"
COPIES = "weight_copies=3: 4 processes cannot be divided evenly; to fix it, make train.processes a multiple of 6"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Train(device="cpu", expert_parallel=4, tensor_parallel=2), EXPERTS),
        (Train(device="cpu", weight_copies=3, tensor_parallel=2, strategy="fsdp"), COPIES),
    ],
)
def test_process_count_that_cannot_share_the_model_is_refused(config: Train, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message), join_process_group(config, Rank(0, 0, 4), tmp_path):
        pass
