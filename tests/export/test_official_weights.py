"""The folder of trained weights: read by transformers and by model.pretrained, bit for bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from export import other_formats
from export.other_formats import write_official_weights
from pipeline.contract.pretrained import open_pretrained
from train.pretrained.load import load_from_files

from ..train.pretrained.official import write_official

GENERATION = {"temperature": 0.6, "do_sample": True}


class Wrapped(nn.Module):
    """A task's module around a transformer, with a head that has no official name."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        self.extra = nn.Linear(2, 2)


@pytest.fixture(params=["qwen2", "deepseek_v3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An official checkpoint, quantized by its configuration and stored in half precision."""
    folder = write_official(tmp_path / "source", request.param)
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("wrap", [True, False])
def test_folder_is_read_bit_for_bit(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: bool) -> None:
    monkeypatch.setattr(other_formats, "_SHARD_SIZE", "12KB")
    model = Wrapped(source)
    trained = model.inner if not wrap else model
    folder = tmp_path / "weights"
    assert write_official_weights(trained, source, folder).startswith("weights: ")

    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    official = {name for path in source.glob("*.safetensors") for name in _names(path)}
    assert set(index) == official, "per-expert names, and tied weights once"
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert json.loads((folder / "generation_config.json").read_text()) == GENERATION

    expected = model.inner.state_dict()
    _assert_equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected)
    loaded = load_from_files(partial(Wrapped, folder), open_pretrained(folder), ("extra.*",), lambda: None)
    assert loaded.materializer is not None
    loaded.materializer.materialize(loaded.model, torch.device("cpu"))
    _assert_equal(loaded.model.get_submodule("inner").state_dict(), expected)


def test_body_alone_is_written_under_its_own_class(source: Path, tmp_path: Path) -> None:
    body = AutoModel.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    assert write_official_weights(nn.ModuleDict({"body": body}), source, tmp_path / "weights")
    _assert_equal(AutoModel.from_pretrained(tmp_path / "weights").state_dict(), body.state_dict())


def test_other_models_have_no_official_names(tmp_path: Path) -> None:
    assert not write_official_weights(nn.Linear(2, 2), tmp_path, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_transformers_that_a_task_has_changed_are_not_written(tmp_path: Path) -> None:
    source, folder = write_official(tmp_path / "source", "qwen2"), tmp_path / "weights"
    shared = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    assert "weights not written: The weights trying to be saved contained shared" in write_official_weights(
        shared, source, folder
    )
    adapted = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), adapted)
    assert "the task adds adapters by itself" in write_official_weights(adapted, source, folder)
    assert not folder.exists()


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype == torch.float32, name
        assert torch.equal(actual[name], tensor), name
