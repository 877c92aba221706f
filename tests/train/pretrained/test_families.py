"""Families that transformers knows are loaded from their published layout, bit for bit as transformers loads them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.contract.pretrained import open_pretrained
from pipeline.system.errors import ConfigError, DataError
from train.optim import seed_step
from train.pretrained.load import load_from_files

TEXT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 8}  # fmt: skip  # noqa: E501
BOTH_SIDES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 60, **TOKENS, "decoder_start_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": TEXT,
    "distilbert": {"vocab_size": 60, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta": TEXT | TOKENS,
    "mpnet": TEXT,
    "albert": TEXT | {"embedding_size": 8},
    "deberta-v2": TEXT,
    "nomic_bert": TEXT | TOKENS | {"head_dim": 8},  # its files have queries, keys and values in one tensor
    "vit": PICTURE,
    "dinov2": PICTURE,
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "whisper": BOTH_SIDES | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    "t5": {"vocab_size": 60, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1},
    "bart": BOTH_SIDES,
    "gpt2": {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, **TOKENS},
}
HEADS = TEXT | TOKENS | {"num_key_value_heads": 2, "head_dim": 8}
LATENT = TEXT | TOKENS | {
    "num_key_value_heads": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "qwen3_moe": HEADS | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": HEADS | {"sliding_window": 6},
    "mixtral": HEADS | {"num_local_experts": 4},
    "gemma": HEADS,
    "gemma2": HEADS,
    "gemma3_text": HEADS | {"sliding_window": 6},
    "phi3": TEXT | TOKENS | {"num_key_value_heads": 2},
    "gpt_oss": HEADS | {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def published(folder: Path, family: str, kind: Any = AutoModel) -> Path:
    torch.manual_seed(0)
    kind.from_config(CONFIG_MAPPING[family](**{**FAMILIES, **DECODERS}[family])).save_pretrained(folder)
    return folder


def build(folder: Path, kind: Any = AutoModel) -> nn.Module:
    model: nn.Module = kind.from_config(AutoConfig.from_pretrained(folder))
    return model


def load(folder: Path, kind: Any = AutoModel, allow: tuple[str, ...] = ()) -> nn.Module:
    loaded = load_from_files(partial(build, folder, kind), open_pretrained(folder), allow, partial(seed_step, 0, -1, 0))
    loaded.materializer.materialize(loaded.model, torch.device("cpu"))
    return loaded.model


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_of_transformers_loading(tmp_path: Path, family: str) -> None:
    folder = published(tmp_path, family)
    assert_equal(load(folder), AutoModel.from_pretrained(folder))


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_equal_those_of_transformers_loading_and_learn(tmp_path: Path, family: str) -> None:
    folder = published(tmp_path, family, AutoModelForCausalLM)
    model: Any = load(folder, AutoModelForCausalLM)
    assert_equal(model, AutoModelForCausalLM.from_pretrained(folder))
    ids = torch.arange(24).reshape(2, 12)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(ids, labels=ids, use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]


def test_names_of_earlier_versions_are_known(tmp_path: Path) -> None:
    folder = published(tmp_path, "bert")
    expected = AutoModel.from_pretrained(folder)
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    assert any(name.endswith("gamma") for name in weights)
    save_file(weights, folder / "model.safetensors")
    assert_equal(load(folder), expected)


def test_buffers_that_the_model_computes_may_be_in_the_files(tmp_path: Path) -> None:
    """As in files of BERT models that earlier versions of transformers wrote."""
    folder = published(tmp_path, "bert")
    expected = AutoModel.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"embeddings.position_ids": torch.arange(512)[None]}, folder / "model.safetensors")
    assert_equal(load(folder), expected)


def test_a_new_head_is_named_before_training(tmp_path: Path) -> None:
    folder = published(tmp_path, "bert")
    with pytest.raises(DataError, match=r"missing: classifier\.weight .*allow_mismatch"):
        load(folder, AutoModelForSequenceClassification)
    model = load(folder, AutoModelForSequenceClassification, ("classifier.*",))
    body = AutoModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, body[name]) for name, tensor in model.get_submodule("bert").state_dict().items())


def test_a_folder_without_a_model_type_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path, "bert")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16}))
    with pytest.raises(ConfigError, match="has no model_type"):
        open_pretrained(folder)


def test_small_files_of_sentence_transformers_belong_to_the_model(tmp_path: Path) -> None:
    folder = published(tmp_path, "bert")
    (folder / "1_Pooling").mkdir()
    for name in ("modules.json", "1_Pooling/config.json", "vocab.txt"):
        (folder / name).write_text("{}")
    assert {"modules.json", "1_Pooling/config.json", "vocab.txt", "config.json"} <= open_pretrained(folder).small.keys()
