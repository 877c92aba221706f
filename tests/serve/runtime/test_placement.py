from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.errors import ResourceError
from serve.runtime import placement
from serve.runtime.placement import Kernel, Node, elsewhere, told

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def _on_cpu(name: str, op: str, *tensors: tuple[str, tuple[int, ...]]) -> Kernel:
    return Kernel(Node(name, op, CPU), tensors)


SHAPES = [
    _on_cpu("shape", "Shape", ("float", (4, 1, 8, 8)), ("int64", (4,))),
    _on_cpu("first", "Gather", ("int64", (4,)), ("int64", ()), ("int64", ())),
    _on_cpu("new", "Concat", ("int64", (1,)), ("int64", (1,)), ("int64", (2,))),
]
ON_CUDA = Kernel(Node("product", "MatMul", CUDA), (("float", (4, 64)), ("float", (4, 10))))


def test_a_model_that_runs_where_it_should_has_nothing_elsewhere() -> None:
    assert elsewhere([ON_CUDA.node], [ON_CUDA], CUDA) == []
    assert told([]) == ""


def test_the_arithmetic_of_shapes_may_stay_on_the_cpu() -> None:
    ran = [*SHAPES, ON_CUDA]
    assert elsewhere([kernel.node for kernel in ran], ran, CUDA) == []


@pytest.mark.parametrize(
    "kernel",
    [
        _on_cpu("exp", "Exp", ("float", (4, 10)), ("float", (4, 10))),
        _on_cpu("gather", "Gather", ("float", (100, 8)), ("int64", (4,)), ("float", (4, 8))),
        _on_cpu("scale", "Cast", ("int64", ()), ("float", ())),
        _on_cpu("ids", "Add", ("int64", (4, 16)), ("int64", (4, 16))),
        _on_cpu("many", "Add", ("int64", (65,)), ("int64", (65,))),
        _on_cpu("small", "Add", ("int16", (4,)), ("int16", (4,))),
    ],
)
def test_data_that_goes_through_the_cpu_is_found(kernel: Kernel) -> None:
    ran = [*SHAPES, ON_CUDA, kernel]
    assert elsewhere([one.node for one in ran], ran, CUDA) == [kernel.node]


def test_a_node_that_did_not_run_is_found_too() -> None:
    """Such as one in the branch that the golden request did not take."""
    hidden = Node("untaken", "Exp", CPU)
    assert elsewhere([ON_CUDA.node, hidden], [ON_CUDA], CUDA) == [hidden]


def test_a_node_of_a_loop_is_found_whatever_its_last_round_was() -> None:
    rounds = [_on_cpu("sum", "Add", ("int64", (size,)), ("int64", (size,))) for size in (100, 1)]
    assert elsewhere([], rounds, CUDA) == [rounds[0].node]


def test_the_sentence_names_a_few_nodes_and_counts_the_rest() -> None:
    nodes = [Node(f"n{index}", "Exp", CPU) for index in range(6)] + [Node("", "Abs", CPU)]
    assert told(nodes) == (
        "7 of the model's nodes run on another provider: n0 (Exp, CPUExecutionProvider), "
        "n1 (Exp, CPUExecutionProvider), n2 (Exp, CPUExecutionProvider), n3 (Exp, CPUExecutionProvider), "
        "n4 (Exp, CPUExecutionProvider) and 2 more"
    )
    assert told(nodes[-1:]).startswith("1 of the model's nodes runs on another provider: unnamed (Abs")


def _branches(path: Path) -> Path:
    """Exp for batches of more than one, else Erf; the batch is read off the shape."""
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for name, op in (("many", "Exp"), ("one", "Erf"))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Shape", ["x"], ["shape"], name="shape"),
            helper.make_node("Gather", ["shape", "zero"], ["batch"], name="batch"),
            helper.make_node("Greater", ["batch", "limit"], ["is_many"], name="is_many"),
            helper.make_node("If", ["is_many"], ["y"], name="if", then_branch=branches[0], else_branch=branches[1]),
        ],
        "branches",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.array(0), "zero"), numpy_helper.from_array(np.array(1), "limit")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_onnx_runtime_tells_of_every_node_and_of_all_that_ran(tmp_path: Path) -> None:
    """Asked of a session on the CPU: all of it is where it should be for the CPU, and elsewhere for CUDA."""
    options = onnxruntime.SessionOptions()
    with placement.scratch() as folder:
        placement.watch(options, folder)
        session = onnxruntime.InferenceSession(str(_branches(tmp_path / "m.onnx")), options, providers=[CPU])
        nodes, ran = placement.observe(session, {"x": np.ones((3, 4), np.float32)})
    assert not folder.exists()
    assert {node.name for node in nodes} == {"shape", "batch", "is_many", "if", "many", "one"}
    assert {kernel.node.name for kernel in ran} == {"shape", "batch", "is_many", "if", "many"}
    assert elsewhere(nodes, ran, CPU) == []
    assert {node.name for node in elsewhere(nodes, ran, CUDA)} == {"if", "many", "one"}


def test_without_a_folder_to_write_to_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ResourceError, match="name one with TMPDIR"), placement.scratch():
        raise AssertionError("there is no such folder")
