"""Multi-token prediction: an additional layer that is trained but not served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper

from export.llm.decoder import convert_language, make_generation
from pipeline.contract.data import Samples, forward
from pipeline.contract.pretrained import open_pretrained
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import load_class
from tests.weights import save_weights
from train.pretrained.load import match_weights

from .conftest import DEEPSEEK, Module, smallest


@pytest.fixture
def task(pretrain_module: Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return smallest("MultiToken", pretrain_module, monkeypatch, tmp_path / "files")


@pytest.fixture
def model(task: Any) -> Any:
    torch.manual_seed(0)
    return task.model()


def batch_of(task: Any, split: str = "train") -> dict[str, torch.Tensor]:
    samples = Samples(split, task.data(split))
    return samples.batch(range(min(4, len(samples))))


def multi_token_logits(task: Any, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found: Any = forward(model, task, batch)
    rest: torch.Tensor = found[:, batch["input_ids"].shape[1] :]
    return rest


def test_multi_token_loss_decreases_in_training(task: Any, model: Any) -> None:
    batch, losses = batch_of(task), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(10):
        outputs = forward(model, task, batch)
        losses.append(-task.metrics(outputs, batch)["minus_multi_token_loss"].mean().item())
        optimizer.zero_grad()
        task.loss(outputs, batch).backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(280), rel=0.05), "as good as chance"
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for name, p in model.named_parameters() if "layers.2.eh_proj" in name)


def test_loss_is_next_token_plus_weighted_multi_token_loss(task: Any, model: Any) -> None:
    batch = batch_of(task)
    outputs: Any = forward(model, task, batch)
    one: Any = load_class("task.py:Pretrain", DEEPSEEK / "pretrain")()
    plain = one.loss(outputs[:, : batch["input_ids"].shape[1]], batch)
    further = -task.metrics(outputs, batch)["minus_multi_token_loss"].mean()
    torch.testing.assert_close(task.loss(outputs, batch), plain + 0.3 * further)


@torch.no_grad()
def test_multi_token_layer_sees_the_next_token_but_not_its_target(task: Any, model: Any) -> None:
    batch = batch_of(task, "test")
    place = 40
    expected = multi_token_logits(task, model.eval(), batch)[:, place]
    for ahead, same in ((1, False), (2, True)):
        ids = batch["input_ids"].clone()
        ids[:, place + ahead] = 77
        found = multi_token_logits(task, model, {**batch, "input_ids": ids})[:, place]
        assert torch.allclose(found, expected, atol=1e-6) == same, f"{ahead} further on"


@torch.no_grad()
def test_served_logits_equal_those_of_the_plain_model(task: Any, model: Any) -> None:
    batch = batch_of(task, "test")
    both: Any = forward(model.eval(), task, batch)
    assert both.shape[1] == 2 * batch["input_ids"].shape[1] - 1
    plain = task.language_model(model)
    ids, seen = batch["input_ids"][:1, batch["attention_mask"][0] == 1], batch["attention_mask"][0] == 1
    alone: Any = forward(model, task, batch)
    assert torch.equal(alone, both[:, : len(seen)]), "only the next token, as export compares it"
    row = alone[0, seen]
    torch.testing.assert_close(plain(input_ids=ids).logits[0], row)
    assert type(plain).__name__ == "DeepseekV3ForCausalLM"
    assert not [name for name in plain.state_dict() if name.startswith("model.layers.2.")], "nothing of it is exported"
    metrics = task.metrics(task.baseline()(batch), batch)
    assert set(metrics) == set(task.metrics(both, batch)) == set(task.metrics(alone, batch)), "of a champion, too"
    assert metrics["minus_multi_token_loss"].tolist() == pytest.approx([-math.log(280)] * len(both), rel=1e-4)


@pytest.mark.long  # ten seconds; the test before this one checks the exported model
def test_exported_graph_has_no_multi_token_layer(task: Any, model: Any, tmp_path: Path) -> None:
    plain = task.language_model(model.eval())
    convert_language(plain, make_generation(task, plain), Export(), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    weights = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    layers = {name.partition("layers.")[2].partition(".")[0] for name in weights if "layers." in name}
    assert layers == {"0", "1"}
    extra = [tensor for name, tensor in model.state_dict().items() if name.startswith("model.layers.2.")]
    own = {tuple(sorted(tensor.flatten().tolist())) for tensor in extra if tensor.numel() > 16}
    assert own and not [name for name, array in weights.items() if tuple(sorted(array.ravel().tolist())) in own]
    assert {output.name for output in graph.output} == {"logits"} | {
        f"present.{layer}.{part}" for layer in range(2) for part in ("latent", "rope")
    }


def test_checkpoint_has_the_official_layout_and_can_be_loaded(task: Any, model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    state = model.state_dict()
    save_weights({name: t for name, t in state.items() if name != "lm_head.weight"}, folder / "model.safetensors")
    assert {"model.layers.2.enorm.weight", "model.layers.2.shared_head.norm.weight"} <= set(state)
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    from transformers import AutoConfig, AutoModelForCausalLM

    def plain(place: Path) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place))

    _, matched = match_weights(lambda: plain(folder), open_pretrained(folder), ())
    assert matched.left_out and all(name.startswith("model.layers.2.") for name in matched.left_out)
