"""Variants of language models are judged by the task's metrics, perplexity, and reading token by token."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from pydantic import ValidationError
from torch import Tensor

from export.bundle import Sources, fill_bundle
from export.checks.verify import write_and_compare
from export.conversion.to_onnx import save_stripped
from export.kinds import open_exporter
from export.llm.decoder import open_decoder
from export.llm.variants import Perplexity, token_losses
from export.llm.weight_only import LANGUAGE_CONVERTERS
from export.subject import Subject
from export.variants.choose import VariantEvaluation, VariantResult, decide, explanations, rows
from export.variants.quantize import VariantInputs
from pipeline.contract.bundle import Ancestors, open_bundle, write_manifest
from pipeline.contract.config import parse_config
from pipeline.contract.data import open_split
from pipeline.contract.golden import greedy
from pipeline.contract.settings.stages import Export
from pipeline.contract.signature import Prompting
from pipeline.contract.task import check_export
from pipeline.statistics.intervals import Interval
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_file
from tests.serve.conftest import Launcher

from .languages import CODEC, MASKED, Language, causal, tokenizer

VARIANTS = ["fp32", "fp16", "int8", "int4", "int4-gptq"]
SIZE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


class Likely(Language):
    """A task whose metric is the likelihood of the tokens; half of the texts have labels for their last tokens only."""

    def metrics(self, outputs: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        scores = outputs[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        return {"likelihood": scores.mean(1)}


def compare(folder: Path, **export: Any) -> VariantEvaluation:
    prompting = Prompting(begin=(1,), end=(2,), prompts=((3, 1, 4), (5,)))
    task: Any = Likely(causal("Llama", **SIZE), inputs=MASKED, settings=prompting)
    settings = {"variants": VARIANTS, "budget": {"perplexity": 2.0}, "variant_margin": 1.0, **export}
    config = parse_config(
        {"name": "x", "task": "t.py:T", "codec": "c.py:C", "export": settings, "evaluate": {"metric": "likelihood"}},
        source="test",
    )
    kind = open_exporter(Subject(task, task.model(), open_split(task, "test"), config.export, folder / "model.onnx"))
    write_and_compare(kind)
    return VariantEvaluation(kind, config, folder / "variants", kind.converters)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[VariantEvaluation, list[VariantResult]]:
    comparison = compare(tmp_path_factory.mktemp("language"))
    return comparison, comparison.entries()


@pytest.mark.long
def test_variants_are_made_run_and_timed(whole: tuple[VariantEvaluation, list[VariantResult]]) -> None:
    entries = {entry.name: entry for entry in whole[1]}
    assert list(entries) == VARIANTS
    assert {name: entry.faults for name, entry in entries.items()} == dict.fromkeys(VARIANTS, ())
    noise = {name: entry.deviation.noise for name, entry in entries.items() if entry.deviation}
    assert noise["fp32"] < 1e-5 < noise["fp16"] < noise["int8"] < noise["int4-gptq"] < noise["int4"]
    for entry in entries.values():
        assert entry.timing is not None and entry.timing.p50_ms.keys() == {1, 32}
        assert isinstance(entry.own_measure, Perplexity) and entry.own_measure.increase is not None
        assert entry.outcome is not None and entry.outcome.samples == 9
    exact = entries["fp32"].own_measure
    assert (
        isinstance(exact, Perplexity) and exact.value == exact.reference and exact.increase == Interval(0.0, 0.0, 0.0)
    )
    assert entries["int4"].bytes < entries["int8"].bytes < entries["fp16"].bytes < entries["fp32"].bytes


@pytest.mark.long
def test_perplexity_is_in_the_record_and_the_log(whole: tuple[VariantEvaluation, list[VariantResult]]) -> None:
    entries = whole[1]
    choice = decide(whole[0].config.export, entries)
    record = json.loads(json.dumps(rows(entries, choice.reasons, choice.name, "likelihood"), allow_nan=False))
    assert record[3]["perplexity"]["increase"]["high"] < 2.0
    assert "perplexity" in explanations(entries, choice.reasons)[3]


@pytest.mark.long
def test_rounding_weights_beyond_the_budget_is_a_fault(tmp_path: Path) -> None:
    def damage(material: VariantInputs, path: Path) -> str:
        note = LANGUAGE_CONVERTERS["int4"](material, path)
        model = onnx.load(path)
        name = next(node.input[2] for node in model.graph.node if node.op_type == "MatMulNBits")
        scale = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 3, scale.name))
        save_stripped(model, path, external=False)
        return note

    comparison = compare(tmp_path, variants=["int4"], choose="int4", budget={"perplexity": 0.05})
    damaged = replace(comparison, converters={"int4": damage})
    _, entry = damaged.entries()
    assert any("over export.budget perplexity=0.05" in fault for fault in entry.faults), entry
    assert entry.first_wrong is not None
    assert "is not shipped" in decide(comparison.config.export, [entry]).refusal


@pytest.mark.long
def test_openai_service_answers_from_int4_weights(
    whole: tuple[VariantEvaluation, list[VariantResult]], tmp_path: Path
) -> None:
    comparison, entries = whole
    entry, bundle = next(entry for entry in entries if entry.name == "int4"), tmp_path / "bundle"
    bundle.mkdir()
    shutil.copyfile(entry.path, bundle / "model.onnx")
    assert any(node.op_type == "MatMulNBits" for node in onnx.load(bundle / "model.onnx").graph.node)
    (tmp_path / "talk_codec.py").write_text(CODEC)
    tokenizer(tmp_path / "files")
    config = parse_config({"name": "talk", "task": "t.py:T", "codec": "talk_codec.py:Codec"}, source="test")
    kind: Any = comparison.exporter
    properties = replace(kind.properties, variant="int4", rounding=comparison.rounding(entry))
    fill_bundle(bundle, kind, config, Sources(tmp_path, tmp_path / "files"), properties)
    (bundle / "card.md").write_text("# talk\n")
    ancestors = Ancestors(code="c", data="d", checkpoint="k", verdict="v", onnx=digest_file(bundle / "model.onnx"))
    write_manifest(bundle, "talk", "pass", ancestors)
    assert open_bundle(bundle).signature.variant == "int4"
    expected = greedy(open_decoder(entry.path, kind.generation), [[3, 1, 4]], 3)[0].tokens
    with contextlib.closing(Launcher()) as launch:
        url = f"{launch(bundle).url}/openai/v1/completions"
        body = {"model": "talk", "prompt": [3, 1, 4], "max_tokens": 3, "temperature": 0}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            text = json.load(answer)["choices"][0]["text"]
    assert re.findall(r"\d+", text) == [str(token) for token in expected if token not in kind.generation.end]


@pytest.mark.parametrize(
    ("increase", "is_fault"),
    [(None, True), (Interval(0.001, -0.01, 0.009), False), (Interval(0.001, -0.01, 0.02), True)],
)
def test_whole_interval_of_perplexity_must_be_within_its_limit(increase: Interval | None, is_fault: bool) -> None:
    assert bool(list(Perplexity(5.0, 5.0, increase).faults({}))) == is_fault


def test_losses_count_tokens_after_the_first_of_each_text() -> None:
    ids, segments = np.array([[0, 0, 3, 4, 5, 6]]), np.array([[0, 1, 1, 2, 2, 2]])
    logits = np.zeros((1, 6, 8), np.float32)
    losses, counted = token_losses(logits, ids, segments, segments != 0)
    assert counted.tolist() == [[False, True, False, True, True]]
    assert losses.sum() == pytest.approx(3 * np.log(8))
    _, labelled = token_losses(logits, ids, segments, np.array([[0, 0, 0, 0, 0, 1]]) == 1)
    assert labelled.tolist() == [[False, False, False, False, True]]


def test_bf16_is_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="bf16 cannot run on a CPU, where ONNX Runtime has no products of it"):
        Export.model_validate({"variants": ["fp32", "bf16"]})


@pytest.mark.parametrize("names", [["int8-dynamic"], ["int8-static", "int4"]])
def test_variants_of_other_models_are_refused_before_training(names: list[str]) -> None:
    config = parse_config(
        {"name": "x", "task": "t.py:T", "codec": "c.py:C", "export": {"variants": names}}, source="test"
    )
    task: Any = Language(torch.nn.Identity())
    with pytest.raises(ConfigError, match="is not for a language model; use int8 or int4"):
        check_export(task, config.export)
