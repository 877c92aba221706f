"""Which layers with thin products beside them are cut, decided without any process."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from train.families.adapted import linear_in, styles
from train.strategy.pairs import find_pairs

from .mixture import Language


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)


def adapted(**words: Any) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    model: nn.Module = inject_adapter_in_model(LoraConfig(r=2, target_modules=["fc1", "fc2"], **words), Mlp())
    return model


def test_attention_and_mlp_of_an_adapted_model_are_cut() -> None:
    pairs = find_pairs(Language("AdaptedLlama"), 2)
    assert [pair.columns[0].rpartition(".")[2] for pair in pairs] == ["q_proj", "gate_proj"] * 2


def test_the_thin_matrix_on_the_cut_side_is_cut_and_the_other_one_whole() -> None:
    model = adapted()
    first, second = (styles(name, model.get_submodule(name), by_outputs=name == "fc1") for name in ("fc1", "fc2"))
    assert {name: type(style) for name, style in (first | second).items()} == {
        "fc1.base_layer": ColwiseParallel,
        "fc1.lora_B.default": ColwiseParallel,
        "fc2.base_layer": RowwiseParallel,
        "fc2.lora_A.default": RowwiseParallel,
    }


@pytest.mark.parametrize("words", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_that_looks_at_the_whole_layer_stays_whole(words: dict[str, Any]) -> None:
    assert linear_in(adapted().get_submodule("fc1")) is not None
    assert linear_in(adapted(**words).get_submodule("fc1")) is None
