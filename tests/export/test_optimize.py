"""An optimized file is what is verified and shipped, or it is not used.

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

from export.checks.verify import write_and_compare
from export.conversion import optimize
from export.conversion.optimize import (
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
from export.sessions import open_session
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError
from pipeline.system.files import digest_file

from .conftest import Small, open_model, pairs

FEED = {"x": np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)}


def network(folder: Path, external: bool = False) -> Path:
    """Write a spelt-out layer norm, a product with an activation, and a computed constant: work for each level."""
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
def test_optimized_file_has_the_same_outputs(tmp_path: Path, level: str, operator: str, external: bool) -> None:
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


def test_fused_operators_are_reported(tmp_path: Path) -> None:
    path = network(tmp_path / "bundle")
    expected = answer(path)
    found = optimize_file(path, nn.Identity(), Export(optimize="transformers"))
    assert found is not None
    assert found.fused["LayerNormalization"] == 1
    check_file(path)
    assert np.allclose(answer(path), expected, atol=1e-5)


def test_optimization_is_deterministic(tmp_path: Path) -> None:
    digests = set()
    for name in ("a", "b"):
        path = network(tmp_path / name)
        optimize_file(path, nn.Identity(), Export(optimize="extended"))
        assert str(tmp_path).encode() not in path.read_bytes()
        digests.add(digest_file(path))
    assert len(digests) == 1


def test_file_is_unchanged_without_optimization(tmp_path: Path) -> None:
    path = network(tmp_path / "bundle")
    before = path.read_bytes()
    assert optimize_file(path, nn.Identity(), Export()) is None
    assert path.read_bytes() == before


@pytest.mark.parametrize("external", [False, True])
def test_plain_file_is_restored_byte_for_byte(tmp_path: Path, external: bool) -> None:
    path = network(tmp_path / "bundle", external)
    before = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    found = optimize_file(path, nn.Identity(), Export(optimize="extended"))
    assert found is not None
    remove_model(path)
    written: Any = object()
    assert restore_plain(path, written) is written
    assert {one.name: one.read_bytes() for one in path.parent.iterdir()} == before


def test_fusions_follow_the_model_type() -> None:
    class Configured(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.config: Any = type("Config", (), {"model_type": kind})()

    assert [model_type(nn.Sequential(Configured(kind))) for kind in ("gpt2", "roberta")] == ["gpt2", "bert"]
    assert model_type(nn.Identity()) == "bert"


def test_wrong_optimized_file_is_not_used(
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
    report = write_and_compare(open_model(task, path, Export(optimize="basic")))
    report.require(Export())
    message = report.file["optimize"]
    assert (message["requested"], message["used"]) == ("basic", "none")
    assert message["reason"].startswith("the optimized file differs from the model: ")
    assert "the first node that is wrong is `" in message["reason"]
    assert "export.optimize=basic is not used: the optimized file differs from the model" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["bundle"]
    assert json.dumps(report.file)


def test_unsound_optimized_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(path: Path, model: nn.Module, config: Export) -> Optimization | None:
        found = optimize_file(path, model, config)
        proto = onnx.load(path)
        proto.graph.node[-1].op_type = "SimplifiedLayerNormalization"  # the runtime's own, under ONNX's name
        onnx.save(proto, path)
        return found

    monkeypatch.setattr(optimize, "optimize_file", fused)
    task: Any = Small(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), pairs())
    (tmp_path / "bundle").mkdir()
    report = write_and_compare(open_model(task, tmp_path / "bundle" / "model.onnx", Export(optimize="basic")))
    report.require(Export())
    assert report.file["optimize"]["used"] == "none"
    assert "not sound by ONNX's own rules" in report.file["optimize"]["reason"]


def test_failing_fusions_leave_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_file_that_loads_is_unchanged(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    assert fit_runtime(path) == ""
    assert path.read_bytes() == before
    check_file(path)


def test_ir_version_beyond_the_runtime_is_lowered(tmp_path: Path) -> None:
    path = written(tmp_path, ir_version=99)
    assert "max supported IR version" in load_error(path)
    assert fit_runtime(path).startswith("lowered from IR version 99 to 9, which is what ONNX Runtime ")
    check_file(path)


def test_operator_set_beyond_the_runtime_is_lowered_until_it_loads(tmp_path: Path) -> None:
    path = written(tmp_path, opset=NEWEST, ir_version=onnx.IR_VERSION)
    assert load_error(path), "the runtime has caught up with onnx: there is nothing to lower any more"
    assert f"lowered from opset {NEWEST} to " in fit_runtime(path)
    assert read_versions(path)["opset"] < NEWEST
    assert load_error(path) == ""
    check_file(path)


def test_opset_that_cannot_be_lowered_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, opset=NEWEST + 20)
    before = path.read_bytes()
    with pytest.raises(StageError, match=rf"cannot be written in opset {NEWEST + 19}|cannot load it"):
        fit_runtime(path)
    assert path.read_bytes() == before


def test_unknown_operator_of_the_runtime_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, operator="Triple", domain="own.operators")
    assert fit_runtime(path) == "", "another version would not help"
    with pytest.raises(StageError, match=r"that will serve it cannot load it: .*Triple"):
        open_session(path)


def test_inconsistent_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"model\.onnx: not sound by ONNX's own rules: .*2.*3"):
        check_file(written(tmp_path, width=3))


def test_tensor_without_producer_is_refused(tmp_path: Path) -> None:
    def cut(model: onnx.ModelProto) -> None:
        model.graph.node[1].input[0] = "gone"

    with pytest.raises(StageError, match=r"not sound by ONNX's own rules: .*gone"):
        check_file(written(tmp_path, change=cut))
