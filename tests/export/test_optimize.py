"""An optimised file is what is verified and shipped, or it is not used.

A file that the serving ONNX Runtime cannot load is lowered or refused; one that is unsound is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from export import optimize
from export.llm import kind as language_kind
from export.llm.decoder import TorchDecoder, language_export_input, make_generation
from export.llm.fused_attention import convert_fused
from export.llm.greedy import verify_greedy
from export.optimize import (
    Optimization,
    check_file,
    fit_runtime,
    load_error,
    model_type,
    operators,
    optimize_file,
    read_versions,
    remove_model,
    remove_plain,
    restore_plain,
)
from export.sessions import open_session, run
from export.to_onnx import tensor_specs
from export.verify import write_verified
from pipeline.contract.golden import Decoder, empty_past, inputs_of
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError
from pipeline.system.files import digest_file

from .conftest import Small, open_model, pairs
from .languages import MASKED, PROMPTS, Language, causal, make

FEED = {"x": np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)}


def network(folder: Path, external: bool = False) -> Path:
    """A layer norm spelt out, a product with a bend after it, and a constant that is computed: work for each level."""
    folder.mkdir(exist_ok=True)
    rng, value, make = np.random.default_rng(1), helper.make_tensor_value_info, helper.make_node
    numbers = {"w": rng.normal(size=(16, 16)), "b": rng.normal(size=16), "gain": np.ones(16), "shift": np.zeros(16)}
    numbers |= {"two": np.array(2.0), "epsilon": np.array(1e-5), "one": np.array(1.0)}
    nodes = [
        make("Add", ["one", "one"], ["computed"]),
        make("Identity", ["x"], ["same"]),
        make("ReduceMean", ["same", "last"], ["mean"], keepdims=1),
        make("Sub", ["same", "mean"], ["centred"]),
        make("Pow", ["centred", "computed"], ["squared"]),
        make("ReduceMean", ["squared", "last"], ["variance"], keepdims=1),
        make("Add", ["variance", "epsilon"], ["safe"]),
        make("Sqrt", ["safe"], ["deviation"]),
        make("Div", ["centred", "deviation"], ["normed"]),
        make("Mul", ["normed", "gain"], ["scaled"]),
        make("Add", ["scaled", "shift"], ["shifted"]),
        make("Gemm", ["shifted", "w", "b"], ["product"]),
        make("Relu", ["product"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.asarray(number, np.float32), name) for name, number in numbers.items()]
    weights.append(numpy_helper.from_array(np.array([-1], np.int64), "last"))
    given, answered = ([value(name, onnx.TensorProto.FLOAT, ["batch", 16])] for name in ("x", "y"))
    model = helper.make_model(
        helper.make_graph(nodes, "net", given, answered, weights),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=external, location="model.onnx.data", size_threshold=256)
    return path


def answer(path: Path) -> Any:
    return open_session(path).run(None, FEED)[0]


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize(("level", "operator"), [("basic", "Gemm"), ("extended", "com.microsoft.FusedGemm")])
def test_the_file_is_written_anew_and_answers_the_same(
    tmp_path: Path, level: str, operator: str, external: bool
) -> None:
    path = network(tmp_path / "bundle", external)
    expected, before = answer(path), sorted(one.name for one in path.parent.iterdir())
    found = optimize_file(path, nn.Identity(), Export(optimize=level))
    assert found is not None
    assert found.nodes is not None
    assert found.nodes[1] < found.nodes[0]
    assert operator in operators(path)
    assert sorted(one.name for one in path.parent.iterdir()) == before
    check_file(path)
    assert np.allclose(answer(path), expected, atol=1e-5)
    remove_plain(path)
    assert [one.name for one in tmp_path.iterdir()] == ["bundle"]


def test_fusions_of_transformers_are_reported_by_what_they_made(tmp_path: Path) -> None:
    path = network(tmp_path / "bundle")
    expected = answer(path)
    found = optimize_file(path, nn.Identity(), Export(optimize="transformers"))
    assert found is not None
    assert found.fused["LayerNormalization"] == 1
    check_file(path)
    assert np.allclose(answer(path), expected, atol=1e-5)


@pytest.mark.long
def test_a_decoder_has_one_operator_for_attention_and_gives_torchs_logits(tmp_path: Path) -> None:
    """Rows of several lengths continue a past by several tokens, which GroupQueryAttention refuses."""
    model = causal("Qwen2", num_hidden_layers=2)
    before = model.config._attn_implementation
    generation = make_generation(Language(model), model)
    path = network(tmp_path / "bundle")  # is replaced
    _, result = convert_fused(language_export_input(model, generation), Export(optimize="transformers"), path)
    assert (result.used, result.reason) == ("transformers", "")
    assert (result.fused["Attention"], result.fused["RMSNormalization"], result.fused["RotaryEmbedding"]) == (2, 5, 4)
    assert "Softmax" not in operators(path)
    assert model.config._attn_implementation == before
    check_file(path)
    reference, session = TorchDecoder(model, generation), open_session(path)
    specs = {spec.name: spec for spec in tensor_specs(path)[0]}
    decoder = Decoder(lambda feed: run(session, feed), generation, specs)
    assert verify_greedy(model, decoder, PROMPTS, Export()).ties == 0
    ids, mask = np.arange(33).reshape(3, 11), np.ones((3, 11), np.int64)
    mask[1, :3] = 0
    first = inputs_of(generation, ids[:, :4], mask[:, :4], empty_past(decoder, 3))
    past = {cache.input: decoder.run(first)[cache.output] for cache in generation.caches}
    feed = inputs_of(generation, ids[:, 4:], mask, past)
    assert np.allclose(decoder.run(feed)["logits"], reference.run(feed)["logits"], atol=1e-4)


@pytest.mark.long
def test_a_decoder_is_exported_again_if_its_fused_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(decoder: Any, config: Export, path: Path) -> Any:
        converted = convert_fused(decoder, config, path)
        proto = onnx.load(path)
        for node in (node for node in proto.graph.node if node.op_type == "Attention"):
            node.attribute.append(helper.make_attribute("softcap", 0.01))
        onnx.save(proto, path)
        return converted

    monkeypatch.setattr(language_kind, "convert_fused", spoilt)
    made = make("Llama", tmp_path, Export(optimize="transformers"))
    made.report.require(Export())
    optimised = made.report.file["optimize"]
    assert (optimised["used"], optimised["fused"]) == ("none", {})
    assert optimised["reason"].startswith("the optimized file differs from the model: ")
    assert "Attention" not in operators(made.path)


@pytest.mark.long
def test_a_decoder_whose_attention_takes_other_arguments_is_exported_without_fusions(tmp_path: Path) -> None:
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
    report = write_verified(open_model(task, path, Export(optimize="transformers")))
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


def test_the_same_file_is_optimised_to_the_same_bytes(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        path = network(tmp_path / name)
        optimize_file(path, nn.Identity(), Export(optimize="extended"))
        assert str(tmp_path).encode() not in path.read_bytes()
        digests.add(digest_file(path))
    assert len(digests) == 1


def test_nothing_is_done_where_nothing_is_requested(tmp_path: Path) -> None:
    path = network(tmp_path / "bundle")
    before = path.read_bytes()
    assert optimize_file(path, nn.Identity(), Export()) is None
    assert path.read_bytes() == before


@pytest.mark.parametrize("external", [False, True])
def test_the_plain_file_comes_back_byte_for_byte(tmp_path: Path, external: bool) -> None:
    path = network(tmp_path / "bundle", external)
    before = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    found = optimize_file(path, nn.Identity(), Export(optimize="extended"))
    assert found is not None
    remove_model(path)
    written: Any = object()
    assert restore_plain(path, written) is written
    assert {one.name: one.read_bytes() for one in path.parent.iterdir()} == before


def test_the_fusions_are_those_of_the_models_kind() -> None:
    class Configured(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.config: Any = type("Config", (), {"model_type": kind})()

    assert [model_type(nn.Sequential(Configured(kind))) for kind in ("gpt2", "roberta")] == ["gpt2", "bert"]
    assert model_type(nn.Identity()) == "bert"


def test_an_optimised_file_that_is_another_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoilt(path: Path, model: nn.Module, config: Export) -> Optimization | None:
        found = optimize_file(path, model, config)
        proto = onnx.load(path)
        weight = next(one for one in proto.graph.initializer if one.dims[:] == [3, 4] or one.dims[:] == [4, 3])
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * 2, weight.name))
        onnx.save(proto, path)
        return found

    monkeypatch.setattr(optimize, "optimize_file", spoilt)
    torch.manual_seed(0)
    task: Any = Small(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), pairs())
    (tmp_path / "bundle").mkdir()
    path = tmp_path / "bundle" / "model.onnx"
    report = write_verified(open_model(task, path, Export(optimize="basic")))
    report.require(Export())
    message = report.file["optimize"]
    assert (message["requested"], message["used"]) == ("basic", "none")
    assert message["reason"].startswith("the optimized file differs from the model: ")
    assert "the first node that is wrong is `" in message["reason"]
    assert "export.optimize=basic is not used: the optimized file differs from the model" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["bundle"]
    assert json.dumps(report.file)


def test_an_optimised_file_that_is_not_sound_is_not_used_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused(path: Path, model: nn.Module, config: Export) -> Optimization | None:
        found = optimize_file(path, model, config)
        proto = onnx.load(path)
        proto.graph.node[-1].op_type = "SimplifiedLayerNormalization"  # the runtime's own, under ONNX's name
        onnx.save(proto, path)
        return found

    monkeypatch.setattr(optimize, "optimize_file", fused)
    task: Any = Small(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), pairs())
    (tmp_path / "bundle").mkdir()
    report = write_verified(open_model(task, tmp_path / "bundle" / "model.onnx", Export(optimize="basic")))
    report.require(Export())
    assert report.file["optimize"]["used"] == "none"
    assert "not sound by ONNX's own rules" in report.file["optimize"]["reason"]


def test_fusions_that_stumble_leave_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbles(*args: Any, **words: Any) -> None:
        raise KeyError("an unknown node")

    monkeypatch.setattr("onnxruntime.transformers.optimizer.optimize_model", stumbles)
    path = network(tmp_path / "bundle")
    before = path.read_bytes()
    found = optimize_file(path, nn.Identity(), Export(optimize="transformers"))
    assert found is not None
    assert (found.used, path.read_bytes()) == ("none", before)
    assert "an unknown node" in found.reason
    assert [one.name for one in tmp_path.iterdir()] == ["bundle"]


NEWEST = int(onnx.defs.onnx_opset_version())


def written(
    folder: Path,
    opset: int = 20,
    ir_version: int = 10,
    operator: str = "Relu",
    domain: str = "",
    width: int = 2,
    change: Callable[[onnx.ModelProto], Any] = lambda _: None,
) -> Path:
    value = helper.make_tensor_value_info
    nodes = [helper.make_node(operator, ["x"], ["h"], domain=domain), helper.make_node("Add", ["h", "w"], ["y"])]
    given = [value("x", TensorProto.FLOAT, ["batch", 2])]
    answered = [value("y", TensorProto.FLOAT, ["batch", width])]
    weights = [numpy_helper.from_array(np.ones(2, np.float32), "w")]
    graph = helper.make_graph(nodes, "small", given, answered, weights)
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
    change(model)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_a_file_that_loads_is_left_alone(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    assert fit_runtime(path) == ""
    assert path.read_bytes() == before
    check_file(path)


def test_an_ir_version_beyond_the_runtime_is_lowered(tmp_path: Path) -> None:
    path = written(tmp_path, ir_version=99)
    assert "max supported IR version" in load_error(path)
    assert fit_runtime(path).startswith("lowered from IR version 99 to 9, which is what ONNX Runtime ")
    check_file(path)


def test_an_operator_set_beyond_the_runtime_is_lowered_until_it_loads(tmp_path: Path) -> None:
    path = written(tmp_path, opset=NEWEST, ir_version=onnx.IR_VERSION)
    assert load_error(path), "the runtime has caught up with onnx: there is nothing to lower any more"
    assert f"lowered from opset {NEWEST} to " in fit_runtime(path)
    assert read_versions(path)["opset"] < NEWEST
    assert load_error(path) == ""
    check_file(path)


def test_what_cannot_be_lowered_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, opset=NEWEST + 20)
    before = path.read_bytes()
    with pytest.raises(StageError, match=rf"cannot be written in opset {NEWEST + 19}|cannot load it"):
        fit_runtime(path)
    assert path.read_bytes() == before


def test_an_operator_the_runtime_does_not_have_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, operator="Triple", domain="own.operators")
    assert fit_runtime(path) == "", "another version would not help"
    with pytest.raises(StageError, match=r"that will serve it cannot load it: .*Triple"):
        open_session(path)


def test_a_shape_that_is_not_what_the_operators_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"model\.onnx: not sound by ONNX's own rules: .*2.*3"):
        check_file(written(tmp_path, width=3))


def test_a_tensor_that_no_one_makes_is_refused(tmp_path: Path) -> None:
    def cut(model: onnx.ModelProto) -> None:
        model.graph.node[1].input[0] = "gone"

    with pytest.raises(StageError, match=r"not sound by ONNX's own rules: .*gone"):
        check_file(written(tmp_path, change=cut))
