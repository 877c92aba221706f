"""The architectures that can be exported, each in its variants; takes minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from export.checks.verify import write_and_compare
from export.report import LastCheck
from export.subject import ModelProperties
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

from ..conftest import open_model
from .languages import MASKED, POSITIONS, Language, Masked, Text, causal, make


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_distilled_architectures_keep_keys_and_values_of_their_own_heads(kind: str, tmp_path: Path) -> None:
    made = make(kind, tmp_path)
    made.report.require(Export())
    assert made.decoder().specs["past.0.key"].shape == ("batch", 2, "past", 4)
    assert made.report.last_check.record["greedy"]["ties"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [{"n_group": 2, "topk_group": 1}, {"q_lora_rank": None}, {"rope_interleave": False}]
)
def test_deepseek_architectures_equal_torch(settings: dict[str, Any], tmp_path: Path) -> None:
    made = make("DeepseekV3", tmp_path, **settings)
    made.report.require(Export())


class Restless(torch.nn.Module):
    """A router that adds noise, in evaluation as in the service."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = Masked(self.net)(input_ids, attention_mask)
        return found + torch.rand_like(found)


@pytest.mark.long
def test_random_language_model_is_reported(tmp_path: Path) -> None:
    task: Any = Language(causal("Llama"), inputs=MASKED)
    report = write_and_compare(open_model(task, tmp_path / "model.onnx", model=Restless(task.net)))
    assert report.last_check == LastCheck()
    with pytest.raises(StageError, match="torch returns different values of `logits` for the same input"):
        report.require(Export())


class Labels(Text):
    axes: ClassVar[Any] = dict.fromkeys(MASKED, ("batch", "sequence"))
    longest: ClassVar[Any] = {"sequence": POSITIONS}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DeepseekV3", "Qwen2", "Llama"])
def test_classification_head_takes_every_length(kind: str, tmp_path: Path) -> None:
    net = causal(kind, head="SequenceClassification", num_labels=3, pad_token_id=0)
    task: Any = Labels(Masked(net), inputs=MASKED)
    model = open_model(task, tmp_path / "model.onnx")
    report = write_and_compare(model)
    report.require(Export())
    assert model.properties == ModelProperties(axes={"sequence": POSITIONS})
    assert {found["batch_size"] for found in report.rows} >= {1, 2, 5, 7}
