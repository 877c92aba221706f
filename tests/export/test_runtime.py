"""A file that the serving ONNX Runtime cannot load is lowered or refused; one that is unsound is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.parity import open_session
from export.runtime import check_file, fit_runtime, versions_of, why_not_loaded
from pipeline.spec.errors import StageError

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
    assert "max supported IR version" in why_not_loaded(path)
    assert fit_runtime(path).startswith("lowered from IR version 99 to 9, which is what ONNX Runtime ")
    check_file(path)


def test_an_operator_set_beyond_the_runtime_is_lowered_until_it_loads(tmp_path: Path) -> None:
    path = written(tmp_path, opset=NEWEST, ir_version=onnx.IR_VERSION)
    assert why_not_loaded(path), "the runtime has caught up with onnx: there is nothing to lower any more"
    assert f"lowered from opset {NEWEST} to " in fit_runtime(path)
    assert versions_of(path)["opset"] < NEWEST
    assert why_not_loaded(path) == ""
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


def test_a_tensor_that_nobody_makes_is_refused(tmp_path: Path) -> None:
    def cut(model: onnx.ModelProto) -> None:
        model.graph.node[1].input[0] = "gone"

    with pytest.raises(StageError, match=r"not sound by ONNX's own rules: .*gone"):
        check_file(written(tmp_path, change=cut))
