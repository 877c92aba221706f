"""Bundles whose model returns its inputs, for any types and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from pipeline.contract.golden import Golden
from pipeline.contract.signature import NUMPY_TYPES, Limits, TensorSpec
from tests.serve.bundles import signature, write

Array = np.ndarray[Any, Any]
LIMITS = Limits(max_batch_size=16, max_body_bytes=1_000_000)
ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}
CODEC = "class NoCodec:\n    def decode(self, instances): return {}\n    def encode(self, outputs): return []\n"


def sample(datatype: str, shape: Sequence[int | str], rows: int = 2) -> Array:
    """Return an array with the extreme values of a type."""
    sizes = [rows if isinstance(axis, str) else axis for axis in shape]
    kind = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        edges: list[Any] = ["héllo", "", "a b\n"]
    elif kind.kind in "iu":
        edges = [np.iinfo(kind).min, np.iinfo(kind).max, 1]
    else:
        edges = [True, False, False] if kind.kind == "b" else [-0.5, 1.25, 240.0]
    return np.resize(np.array(edges, kind), sizes)


def build(path: Path, specs: Mapping[str, tuple[str, Sequence[int | str]]], missing: Collection[str] = ()) -> Path:
    """Write a bundle that returns input `x` as `x_out`; inputs in `missing` may be NaN, also in the golden request."""
    inputs = [helper.make_tensor_value_info(name, ONNX_TYPES[kind], shape) for name, (kind, shape) in specs.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", ONNX_TYPES[k], shape) for name, (k, shape) in specs.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in specs]
    described = signature(
        [
            TensorSpec(name=name, datatype=kind, shape=shape, allows_missing=name in missing)
            for name, (kind, shape) in specs.items()
        ],
        [TensorSpec(name=f"{name}_out", datatype=kind, shape=shape) for name, (kind, shape) in specs.items()],
        "NoCodec",
        LIMITS,
    )
    given = {name: sample(kind, shape) for name, (kind, shape) in specs.items()}
    for name in missing:
        given[name][0, 0] = np.nan
    found = {f"{name}_out": array for name, array in given.items()}
    graph = helper.make_graph(nodes, "same", inputs, outputs)
    return write(path, graph, described, Golden(given, found, [], [], rtol=0, atol=0), CODEC)


def build_constant(path: Path, number: float) -> Path:
    """Write a bundle without inputs that returns one number."""
    node = helper.make_node("Constant", [], ["y"], value_float=number)
    graph = helper.make_graph([node], "constant", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])])
    golden = Golden({}, {"y": np.array(number, np.float32)}, [], [], rtol=0, atol=0)
    y = TensorSpec(name="y", datatype="FP32", shape=())
    return write(path, graph, signature([], [y], "NoCodec", LIMITS), golden, CODEC)
