"""Sealed bundles of special models, for example one whose input sets its run time, and one that mixes rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, TensorSpec
from tests.serve.bundles import CPU, session, signature, write

CODEC = """
class Plain:
    def decode(self, instances):
        import numpy as np
        return {"x": np.array(instances, np.float32).reshape(len(instances), -1)}

    def encode(self, outputs):
        return outputs["y"].tolist()
"""
WORDS = """
class Plain:
    def decode(self, instances):
        import numpy as np
        return {"x": np.array([[len(one)] for one in instances], np.float32)}

    def encode(self, outputs):
        return [{"next": float(row[0])} if row[0] < 9 else "long" for row in outputs["y"]]
"""
PADDED = """
class Padded:
    def decode(self, instances):
        import numpy as np
        codes = np.zeros((len(instances), 8), np.int64)
        for row, text in zip(codes, instances):
            row[: len(text)] = [ord(letter) for letter in text]
        return {"codes": codes, "mask": (codes > 0).astype(np.int64)}

    def encode(self, outputs, inputs):
        rows = zip(outputs["next"], inputs["mask"], strict=True)
        return ["".join(chr(code) for code in row[mask > 0]) for row, mask in rows]
"""
LIMITS = Limits(max_batch_size=16, max_body_bytes=1 << 20)
X, Y = (TensorSpec(name=name, datatype="FP32", shape=("batch", 1)) for name in "xy")


def slow(path: Path, limits: Limits = LIMITS, runtime: Runtime = CPU) -> Path:
    """Compute y = x + 1, after max(x) thousand rounds of work."""
    work = np.full((64, 64), 1 / 64, np.float32)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["going_on"]),
            helper.make_node("MatMul", ["before", "work"], ["after"]),
        ],
        "round",
        [
            helper.make_tensor_value_info("round", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [64, 64]),
        ],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Mul", ["most", "thousand"], ["many"]),
        helper.make_node("Cast", ["many"], ["rounds"], to=TensorProto.INT64),
        helper.make_node("Loop", ["rounds", "true", "work"], ["worked"], body=body),
        helper.make_node("ReduceMax", ["worked"], ["found"], keepdims=0),
        helper.make_node("Mul", ["found", "zero"], ["nothing"]),
        helper.make_node("Add", ["x", "one"], ["more"]),
        helper.make_node("Add", ["more", "nothing"], ["y"]),
    ]
    values = {
        "work": work,
        "true": np.array(True),
        "zero": np.float32(0),
        "one": np.float32(1),
        "thousand": np.float32(1000),
    }
    return _sealed(path, nodes, values, limits, runtime)


def mixing(path: Path) -> Path:
    """Compute y = x minus the mean of the batch."""
    nodes = [helper.make_node("ReduceMean", ["x", "first"], ["mean"]), helper.make_node("Sub", ["x", "mean"], ["y"])]
    return _sealed(path, nodes, {"first": np.array([0], np.int64)}, LIMITS, CPU)


def worded(path: Path) -> Path:
    """Compute y = x + 1, where x is the length of a text."""
    x = np.array([[1], [9]], np.float32)
    golden = Golden({"x": x}, {"y": x + 1}, ["a", "nine long"], [{"next": 2.0}, "long"], rtol=1e-3, atol=1e-4)
    graph = _graph([helper.make_node("Add", ["x", "one"], ["y"])], {"one": np.float32(1)})
    return write(path, graph, signature([X], [Y], "Plain", LIMITS), golden, WORDS)


def padded(path: Path) -> Path:
    """Return the next letter for each letter and for padding, which the codec cuts off by the mask."""
    shape: list[str | int | None] = ["batch", 8]
    graph = helper.make_graph(
        [helper.make_node("Add", ["codes", "one"], ["next"]), helper.make_node("Identity", ["mask"], ["same"])],
        "padded",
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("codes", "mask")],
        [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("next", "same")],
        [numpy_helper.from_array(np.array(1), "one")],
    )
    inputs, outputs = (
        [TensorSpec(name=name, datatype="INT64", shape=("batch", 8)) for name in names]
        for names in (("codes", "mask"), ("next", "same"))
    )
    codes = np.array([[97, 98, 0, 0, 0, 0, 0, 0], [99, 0, 0, 0, 0, 0, 0, 0]], np.int64)
    given = {"codes": codes, "mask": (codes > 0).astype(np.int64)}
    found = {"next": codes + 1, "same": given["mask"]}
    golden = Golden(given, found, ["ab", "c"], ["bc", "d"], rtol=0, atol=0)
    return write(path, graph, signature(inputs, outputs, "Padded", LIMITS), golden, PADDED)


def deep(path: Path, weights: Sequence[Any], *, beside: bool) -> Path:
    """Multiply ones by square matrices, which keep them ones; the weights are in the model file or beside it."""
    size, names = len(weights[0]), ["x", *(f"h{layer}" for layer in range(1, len(weights))), "y"]
    nodes = [helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]]) for i in range(len(weights))]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size]) for name in "xy"]
    held = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "deep", values[:1], values[1:], held)
    x, y = (TensorSpec(name=name, datatype="FP32", shape=("batch", size)) for name in "xy")
    ones = np.ones((2, size), np.float32)
    golden = Golden({"x": ones}, {"y": ones}, [], [], rtol=0.1, atol=0.1)
    storage: dict[str, Any] = {"save_as_external_data": beside, "location": "model.onnx.data"}
    return write(path, graph, signature([x], [y], "", LIMITS), golden, **storage)


def _graph(nodes: list[Any], values: dict[str, Any]) -> onnx.GraphProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1]) for name in "xy")
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    return helper.make_graph(nodes, "odd", [x], [y], weights)


def _sealed(path: Path, nodes: list[Any], values: dict[str, Any], limits: Limits, runtime: Runtime) -> Path:
    graph, x = _graph(nodes, values), np.array([[0.001], [0.002], [0.0]], np.float32)
    golden = Golden({"x": x}, {"y": session(graph).run(None, {"x": x})[0]}, [], [], rtol=1e-3, atol=1e-4)
    return write(path, graph, signature([X], [Y], "Plain", limits, runtime), golden, CODEC)
