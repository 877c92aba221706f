"""The check step names what cannot be exported of a language model, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.run import Run
from pipeline.steps.check import check
from pipeline.system.errors import ConfigError, DataError

from ..records import write_run_file

TASK = """
import numpy as np
import torch
from transformers import {kind}Config, {kind}ForCausalLM

from pipeline import Prompting


class Task:
    inputs, outputs = ("input_ids",), ("logits",)

    def model(self):
        sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        config = {kind}Config(vocab_size=61, max_position_embeddings=40, **sizes, **{settings})
        return {kind}ForCausalLM(config){convert}

    def data(self, split):
        start = {{"train": 0, "validation": 1, "test": 2}}[split]
        return {{"input_ids": (np.arange(6 * {length}).reshape(6, -1) * 3 + start) % 61}}

    def loss(self, outputs, batch): ...
    def metrics(self, outputs, batch): ...

    def language_model(self, model):
        return model{part}

    def prompting(self):
        return Prompting({prompting})
"""
LATENT = (
    "dict(q_lora_rank=4, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, n_routed_experts=4,"
    " first_k_dense_replace=1, num_key_value_heads=2)"
)
DEFAULTS = {"kind": "Llama", "settings": "{}", "convert": "", "length": 16, "part": "", "prompting": ""}


def write_project(root: Path, **parts: Any) -> Path:
    (root / "task.py").write_text(TASK.format(**{**DEFAULTS, **parts}))
    return root


@pytest.fixture(autouse=True)
def _only_what_is_known_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.steps.check._MOST_WEIGHTS", 0)


def checked(root: Path, **export: Any) -> None:
    (root / "codec.py").write_text("class C:\n    def decode(self, x): ...\n    def encode(self, y): ...\n")
    run = Run(root / "run")
    run.partial("check").mkdir(parents=True, exist_ok=True)
    check(write_run_file(run, "check", task="task.py:Task", export=export), root)


def test_a_language_model_that_can_be_exported_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checked(write_project(tmp_path), formats=["onnx", "genai"], variants=["fp32", "int4"])
    assert "weights is not tried before it is trained; its data and settings were checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"convert": ".to(torch.bfloat16)"}, "has weights of torch.bfloat16; build it with dtype=torch.float32"),
        ({"prompting": "positions_limit=41"}, "allows 41 positions, but the model's configuration ends at 40"),
        ({"prompting": "template='{% if %}'"}, r"prompting\(\): the chat template is not valid Jinja"),
        ({"part": ".lm_head"}, r"language_model\(\) gives a Linear without config.max_position_embeddings"),
        (
            {"kind": "Qwen3Next", "settings": "dict(num_experts=4, layer_types=['linear_attention'])"},
            "layer 0 of the language model keeps a LinearAttentionLayer, which cannot be exported",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused(parts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(write_project(tmp_path, **parts))


def test_rows_that_are_longer_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a text has 41 positions, but the model has 40"):
        checked(write_project(tmp_path, length=41))


def test_a_model_that_computes_with_its_weights_is_built_in_memory(tmp_path: Path) -> None:
    root = write_project(tmp_path, convert="", part="")
    task = root / "task.py"
    task.write_text(
        task.read_text().replace(
            "        return LlamaForCausalLM(config)\n",
            "        model = LlamaForCausalLM(config)\n"
            "        assert float(model.lm_head.weight.detach().abs().sum()) > 0\n"
            "        return model\n",
        )
    )
    checked(root)


def test_copied_causal_model_is_checked(tmp_path: Path) -> None:
    """For example a model with more heads, whose weights `language_model` copies into a plain one."""
    copies = "\n    def language_model(self, model):\n        plain = self.model()\n"
    copies += "        plain.load_state_dict(model.state_dict())\n        return plain\n"
    root = write_project(tmp_path, part=f"\n{copies}")
    checked(root)


def test_genai_is_refused_for_a_latent_model(tmp_path: Path) -> None:
    root = write_project(tmp_path, kind="DeepseekV3", settings=LATENT)
    checked(root)
    with pytest.raises(ConfigError, match=r"export\.formats: onnxruntime-genai reads caches of keys and values"):
        checked(root, formats=["onnx", "genai"])
