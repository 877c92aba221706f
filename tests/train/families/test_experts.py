from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.spec.errors import ConfigError
from pipeline.spec.rank import Rank
from pipeline.spec.sections import Train
from train.families.experts import check_experts, find_experts
from train.group import join


class Experts(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 8, 4))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise AssertionError("it is looked at, not run")


class Others(Experts):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        raise AssertionError("it is looked at, not run")


def test_layers_of_experts_are_known_by_their_parameters_and_arguments() -> None:
    model = nn.ModuleDict({"mixture": Experts(), "other": Others(), "plain": nn.Linear(4, 4)})
    assert list(find_experts(model)) == ["mixture"]


@pytest.mark.parametrize(
    ("expert", "tensor", "said"),
    [
        (
            4,
            1,
            "train.expert=4: 4 processes cannot share the 6 experts of mixture; use numbers whose product divides 6",
        ),
        (2, 2, "train.expert=2 x train.tensor=2: 4 processes cannot share the 6 experts"),
        (1, 4, "train.tensor=4: 4 processes cannot share the 6 experts"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(expert: int, tensor: int, said: str) -> None:
    check_experts({"mixture": Experts()}, 3, 2)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_experts({"mixture": Experts()}, expert, tensor)


def test_a_model_without_experts_cannot_share_them() -> None:
    check_experts({}, 1, 2)
    with pytest.raises(ConfigError, match=r"train\.expert=2: the model has no layer of experts"):
        check_experts({}, 2, 1)


def test_processes_that_cannot_be_shared_out_are_refused_before_they_meet(tmp_path: Path) -> None:
    config = Train(device="cpu", expert=4, tensor=2)
    said = "train.expert=4: 2 copies cannot share the experts; make train.processes a multiple of 8"
    with pytest.raises(ConfigError, match=said), join(config, Rank(0, 0, 4), tmp_path):
        pass
