from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.system.errors import ResourceError
from serve.runtime import session as runtime_session
from serve.runtime.session import Kernel, Node, describe_nodes, misplaced_nodes

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


def _on_cpu(name: str, op: str, *tensors: tuple[str, tuple[int, ...]]) -> Kernel:
    return Kernel(Node(name, op, CPU), tensors)


SHAPES = [
    _on_cpu("shape", "Shape", ("float", (4, 1, 8, 8)), ("int64", (4,))),
    _on_cpu("first", "Gather", ("int64", (4,)), ("int64", ()), ("int64", ())),
    _on_cpu("new", "Concat", ("int64", (1,)), ("int64", (1,)), ("int64", (2,))),
]
ON_CUDA = Kernel(Node("product", "MatMul", CUDA), (("float", (4, 64)), ("float", (4, 10))))


def test_model_on_its_provider_has_no_misplaced_nodes() -> None:
    assert misplaced_nodes([ON_CUDA.node], [ON_CUDA], CUDA) == []
    assert describe_nodes([]) == ""


def test_nodes_may_be_on_several_providers() -> None:
    engine = Kernel(Node("engine", "TRTKernel_graph_0", TENSORRT), (("float", (4, 64)), ("float", (4, 64))))
    ran = [*SHAPES, engine, ON_CUDA]
    assert misplaced_nodes([ON_CUDA.node], ran, TENSORRT, CUDA) == []
    assert misplaced_nodes([ON_CUDA.node], ran, CUDA) == [engine.node]


def test_shape_arithmetic_may_stay_on_the_cpu() -> None:
    ran = [*SHAPES, ON_CUDA]
    assert misplaced_nodes([kernel.node for kernel in ran], ran, CUDA) == []


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
def test_data_on_the_cpu_is_detected(kernel: Kernel) -> None:
    ran = [*SHAPES, ON_CUDA, kernel]
    assert misplaced_nodes([one.node for one in ran], ran, CUDA) == [kernel.node]


def test_misplaced_node_that_did_not_run_is_detected() -> None:
    """For example in a branch that the golden request does not take."""
    hidden = Node("untaken", "Exp", CPU)
    assert misplaced_nodes([ON_CUDA.node, hidden], [ON_CUDA], CUDA) == [hidden]


def test_misplaced_node_in_a_loop_is_detected() -> None:
    rounds = [_on_cpu("sum", "Add", ("int64", (size,)), ("int64", (size,))) for size in (100, 1)]
    assert misplaced_nodes([], rounds, CUDA) == [rounds[0].node]


def test_message_names_a_few_nodes_and_counts_the_rest() -> None:
    nodes = [Node(f"n{index}", "Exp", CPU) for index in range(6)] + [Node("", "Abs", CPU)]
    assert describe_nodes(nodes) == (
        "7 of the model's nodes run on another provider: n0 (Exp, CPUExecutionProvider), "
        "n1 (Exp, CPUExecutionProvider), n2 (Exp, CPUExecutionProvider), n3 (Exp, CPUExecutionProvider), "
        "n4 (Exp, CPUExecutionProvider) and 2 more"
    )
    assert describe_nodes(nodes[-1:]).startswith("1 of the model's nodes runs on another provider: unnamed (Abs")


def _branches(path: Path) -> Path:
    """A model with Exp for batches of more than one row, else Erf."""
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


def test_profile_run_returns_all_nodes_and_those_that_ran(tmp_path: Path) -> None:
    """In a session on the CPU every node is misplaced for CUDA and none for the CPU."""
    options = onnxruntime.SessionOptions()
    with runtime_session.profile_folder() as folder:
        runtime_session.enable_profiling(options, folder)
        session = onnxruntime.InferenceSession(str(_branches(tmp_path / "m.onnx")), options, providers=[CPU])
        nodes, ran = runtime_session.profile_run(session, {"x": np.ones((3, 4), np.float32)})
    assert not folder.exists()
    assert {node.name for node in nodes} == {"shape", "batch", "is_many", "if", "many", "one"}
    assert {kernel.node.name for kernel in ran} == {"shape", "batch", "is_many", "if", "many"}
    assert misplaced_nodes(nodes, ran, CPU) == []
    assert {node.name for node in misplaced_nodes(nodes, ran, CUDA)} == {"if", "many", "one"}


def test_missing_temporary_folder_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ResourceError, match="set TMPDIR"), runtime_session.profile_folder():
        raise AssertionError("there is no such folder")
