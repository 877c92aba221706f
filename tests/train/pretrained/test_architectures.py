"""Each architecture in the official layout: loaded, adapted, trained for a step, saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.task import load_weights
from pipeline.system.errors import DataError
from pipeline.system.processes import Rank
from tests.weights import save_weights
from train.checkpoint.store import CheckpointStore
from train.optim import seed_step
from train.pretrained.load import PretrainedModel, load_from_files
from train.process_group import ProcessGroup
from train.state import Progress

from ..distributed import trainer
from .folders import BLOCK, EIGHT_BITS, quantize, write_folder
from .official import CONFIGS, write_official

CPU = torch.device("cpu")
SEEDED = partial(seed_step, 0, -1, 0)


class Labels(nn.Module):
    """A body with another head."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        self.score = nn.Linear(self.body.config.hidden_size, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.score(self.body(ids).last_hidden_state[:, -1])
        return found


class Labelling:
    inputs, outputs = ("ids",), ("label",)

    def data(self, split: str) -> dict[str, Any]:
        torch.manual_seed(len(split))
        return {"ids": torch.randint(0, 48, (8, 6)), "label": torch.randint(0, 3, (8,))}

    def model(self) -> nn.Module:
        raise AssertionError

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == batch["label"]).float()}


def causal(folder: Path) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def load(make: Any, folder: Path, *allow: str) -> nn.Module:
    initial = load_from_files(partial(make, folder), open_pretrained(folder), allow, SEEDED)
    initial.materializer.materialize(initial.model, CPU)
    return initial.model.eval()


def ids() -> Tensor:
    return torch.arange(18).view(2, 9) * 5 % 48


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_official(tmp_path_factory.mktemp("official") / request.param, request.param)


@torch.no_grad()
def test_logits_equal_those_of_transformers_loading(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = load(causal, folder)
    assert torch.equal(ours(ids()).logits, theirs(ids()).logits)
    assert len(open_pretrained(folder).weights) > 1, "the layout with an index"


@torch.no_grad()
def test_experts_are_in_the_order_of_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, expert 10 would come before expert 2."""
    monkeypatch.setitem(CONFIGS, "deepseek_v2", {**CONFIGS["deepseek_v2"], "n_routed_experts": 11})
    folder = write_official(tmp_path / "experts", "deepseek_v2")
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(load(causal, folder)(ids()).logits, theirs(ids()).logits)


@pytest.mark.parametrize("folder", ["deepseek_v3", "deepseek_v2", "qwen2", "llama"], indirect=True)
def test_adapted_model_is_trained_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    found, allow = open_pretrained(folder), ("score.*", "lm_head.weight")
    built: list[PretrainedModel] = []

    def build() -> PretrainedModel:
        built.append(load_from_files(partial(Labels, folder), found, allow, SEEDED))
        return built[0]

    group = ProcessGroup(Rank(), CPU)
    made = trainer(group, Labelling(), build=build, epochs=1, batch_size=8, lr=0.01)
    body = AutoModel.from_pretrained(folder)
    initial = {name: tensor.clone() for name, tensor in made.strategy.model.state_dict().items()}
    for name, tensor in body.state_dict().items():
        assert torch.equal(initial[f"body.{name}"], tensor), name
    made.fit(Progress(), CheckpointStore(tmp_path / "checkpoints", 1, {}, group), None)
    trained = made.strategy.model.state_dict()
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, initial[name])}
    balanced = {name for name in trained if name.endswith("e_score_correction_bias")}  # by training, without a gradient
    assert changed == {name for name, _ in made.strategy.model.named_parameters()} | balanced
    save_weights(trained, tmp_path / "model.safetensors")
    again = load_weights(Labels(folder), tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(again(ids()), made.strategy.model.eval()(ids()))


def test_new_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    folder, heads = write_official(tmp_path / "qwen2", "qwen2"), list[Tensor]()
    for noise in (1, 2):
        torch.manual_seed(noise)
        heads.append(load(Labels, folder, "score.*").get_parameter("score.weight").detach())
    assert torch.equal(*heads)
    assert 0.05 < float(heads[0].std()) < 0.5, "initialized like nn.Linear"


@torch.no_grad()
def test_fp8_checkpoint_equals_its_dequantized_weights(tmp_path: Path) -> None:
    """Experts, attention and shared experts are eight-bit matrices, the rest is bf16."""
    whole = write_official(tmp_path / "whole", "deepseek_v3")
    eight, plain = dict[str, Tensor](), dict[str, Tensor]()
    for path in open_pretrained(whole).weights.values():
        for name, tensor in load_file(path).items():
            if name.endswith("proj.weight") or "kv_a_proj" in name:
                parts = quantize(tensor)
                eight |= {name + more: part for more, part in parts.items()}
                plain[name] = parts[""].float() * spread(parts["_scale_inv"], tensor.shape)
            else:
                eight[name] = plain[name] = tensor.bfloat16()
    config = json.loads((whole / "config.json").read_text())
    ours = load(causal, write_folder(tmp_path / "eight", eight, 3, {**config, **EIGHT_BITS}))
    theirs = AutoModelForCausalLM.from_pretrained(write_folder(tmp_path / "plain", plain, config=config)).eval()
    assert torch.equal(ours(ids()).logits, theirs(ids()).logits)


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    return scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[: shape[0], : shape[1]]


def edited(folder: Path, removed: str, **added: Tensor) -> Path:
    """Write the same in one file, without the weights with this prefix."""
    state = {name: t for path in open_pretrained(folder).weights.values() for name, t in load_file(path).items()}
    left = {name: tensor for name, tensor in state.items() if not removed or not name.startswith(removed)} | added
    config = json.loads((folder / "config.json").read_text())
    return write_folder(folder.with_name(f"{folder.name}-edited"), left, config=config)


def test_missing_expert_is_reported(tmp_path: Path) -> None:
    folder = edited(write_official(tmp_path / "v3", "deepseek_v3"), "model.layers.1.mlp.experts.2.up_proj")
    with pytest.raises(DataError, match=r"needs the weights of 4 experts; missing: \['mlp.experts.2.up_proj.weight'\]"):
        load(causal, folder)
    folder = edited(write_official(tmp_path / "v2", "deepseek_v2"), "model.layers.1.mlp.experts.3.")
    with pytest.raises(DataError, match=r"experts.gate_up_proj is \[3, 16, 16\] in .*, and \[4, 16, 16\] in the model"):
        load(causal, folder)


def test_expert_of_another_type_is_reported(tmp_path: Path) -> None:
    other_type = "model.layers.1.mlp.experts.2.up_proj.weight"
    folder = write_official(tmp_path / "v3", "deepseek_v3")
    with pytest.raises(
        DataError, match=rf"gate_up_proj is of type I32 in model.safetensors \({other_type}\), and float32"
    ):
        load(causal, edited(folder, other_type, **{other_type: torch.ones(8, 16, dtype=torch.int32)}))


def test_multi_token_prediction_layer_is_ignored(tmp_path: Path) -> None:
    """Official DeepSeek-V3 files have it after the last layer; another surplus layer is none."""
    more = {"model.layers.2.eh_proj.weight": torch.ones(16, 32), "model.layers.2.enorm.weight": torch.ones(16)}
    folder = edited(write_official(tmp_path / "v3", "deepseek_v3"), "", **more)
    assert load(causal, folder).get_parameter("lm_head.weight").shape == (48, 16)
    further = edited(tmp_path / "v3", "", **{"model.layers.3.enorm.weight": torch.ones(16)})
    with pytest.raises(DataError, match=r"unexpected: model.layers.3.enorm.weight \[16\]"):
        load(causal, further)


def test_classification_head_of_transformers_is_allowed(tmp_path: Path) -> None:
    folder = write_official(tmp_path / "llama", "llama")

    def make(folder: Path) -> nn.Module:
        config = AutoConfig.from_pretrained(folder, num_labels=5)
        found: nn.Module = AutoModelForSequenceClassification.from_config(config)
        return found

    ours = load(make, folder, "score.weight", "lm_head.weight")
    assert ours.get_parameter("score.weight").shape == (5, 16)
    assert torch.equal(ours.get_parameter("model.norm.weight"), AutoModel.from_pretrained(folder).norm.weight)


@pytest.mark.long
def test_peft_adapters_load_weights_by_their_original_names(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    folder = write_official(tmp_path / "qwen2", "qwen2")

    def make(folder: Path) -> nn.Module:
        settings = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["score"], "lora_dropout": 0.1}
        results: nn.Module = get_peft_model(Labels(folder), LoraConfig(r=2, **settings))
        return results

    adapted, plain = load(make, folder, "*lora_*", "*score*"), load(Labels, folder, "score.*")
    body = "base_model.model.body"
    with torch.no_grad():
        assert torch.equal(
            adapted.get_submodule(body)(ids()).last_hidden_state, plain.get_submodule("body")(ids()).last_hidden_state
        )
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name or "modules_to_save" in name for name in trained)
    assert float(adapted.get_parameter(f"{body}.layers.0.self_attn.q_proj.lora_A.default.weight").detach().std()) > 0
