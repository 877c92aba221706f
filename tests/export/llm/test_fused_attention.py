"""Language models with ONNX's own operators for attention, norms and rotary embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from export.checks.verify import write_and_compare
from export.conversion.optimize import check_file, operators
from export.llm import kind as language_kind
from export.llm.decoder import TorchDecoder, language_export_input, make_generation, open_decoder
from export.llm.kind import convert_fused, verify_greedy
from pipeline.contract.golden import empty_past, inputs_of
from pipeline.contract.settings.stages import Export

from ..conftest import open_model
from .languages import MASKED, PROMPTS, Language, causal, make


@pytest.mark.long
def test_attention_is_one_operator_and_logits_are_those_of_torch(tmp_path: Path) -> None:
    """Rows of several lengths continue a past by several tokens, which GroupQueryAttention refuses."""
    model = causal("Qwen2", num_hidden_layers=2)
    before = model.config._attn_implementation
    generation = make_generation(Language(model), model)
    path = tmp_path / "model.onnx"
    _, result = convert_fused(language_export_input(model, generation), Export(optimize="transformers"), path)
    assert (result.used, result.reason) == ("transformers", "")
    assert (result.fused["Attention"], result.fused["RMSNormalization"], result.fused["RotaryEmbedding"]) == (2, 5, 4)
    assert "Softmax" not in operators(path)
    assert model.config._attn_implementation == before
    check_file(path)
    reference, decoder = TorchDecoder(model, generation), open_decoder(path, generation)
    assert verify_greedy(model, decoder, PROMPTS, Export()).ties == 0
    ids, mask = np.arange(33).reshape(3, 11), np.ones((3, 11), np.int64)
    mask[1, :3] = 0
    first = inputs_of(generation, ids[:, :4], mask[:, :4], empty_past(decoder, 3))
    past = {cache.input: decoder.run(first)[cache.output] for cache in generation.caches}
    feed = inputs_of(generation, ids[:, 4:], mask, past)
    assert np.allclose(decoder.run(feed)["logits"], reference.run(feed)["logits"], atol=1e-4)


@pytest.mark.long
def test_wrong_fused_file_is_exported_again_without_fusions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert_wrongly(decoder: Any, config: Export, path: Path) -> Any:
        converted = convert_fused(decoder, config, path)
        proto = onnx.load(path)
        for node in (node for node in proto.graph.node if node.op_type == "Attention"):
            node.attribute.append(helper.make_attribute("softcap", 0.01))
        onnx.save(proto, path)
        return converted

    monkeypatch.setattr(language_kind, "convert_fused", convert_wrongly)
    made = make("Llama", tmp_path, Export(optimize="transformers"))
    made.report.require(Export())
    optimized = made.report.file["optimize"]
    assert (optimized["used"], optimized["fused"]) == ("none", {})
    assert optimized["reason"].startswith("the optimized file differs from the model: ")
    assert "Attention" not in operators(made.path)


@pytest.mark.long
def test_attention_with_other_arguments_is_exported_without_fusions(tmp_path: Path) -> None:
    model = causal("Llama")
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def forward(*arguments: Any, **settings: Any) -> Any:
        if attention.config._attn_implementation != "sdpa":
            raise TypeError("an argument that ONNX's operator does not have")
        return original(*arguments, **settings)

    attention.forward = forward
    task: Any = Language(model, inputs=MASKED)
    path = tmp_path / "model.onnx"
    report = write_and_compare(open_model(task, path, Export(optimize="transformers")))
    report.require(Export())
    assert report.file["optimize"]["used"] == "none"
    assert "an argument that ONNX's operator does not have" in report.file["optimize"]["reason"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_fused_decoders_are_verified_and_used(tmp_path: Path, kind: str) -> None:
    made = make(kind, tmp_path, Export(optimize="transformers"))
    made.report.require(Export())
    assert made.report.file["optimize"]["used"] == "transformers"
    assert made.report.file["optimize"]["fused"]["Attention"] == 1
