"""Bundles whose model gives back what it is given, whatever its types and shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from pipeline.contract.golden import Golden
from pipeline.contract.signature import NUMPY_TYPES, Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import write_json

Array = np.ndarray[Any, Any]
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
    """Values at the edges of the type."""
    sizes = [rows if isinstance(axis, str) else axis for axis in shape]
    kind = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        edges: list[Any] = ["héllo", "", "a b\n"]
    elif kind.kind in "iu":
        edges = [np.iinfo(kind).min, np.iinfo(kind).max, 1]
    else:
        edges = [True, False, False] if kind.kind == "b" else [-0.5, 1.25, 240.0]
    return np.resize(np.array(edges, kind), sizes)


def build(
    path: Path,
    specs: Mapping[str, tuple[str, Sequence[int | str]]],
    seal: Callable[[Path], str],
    missing: Collection[str] = (),
) -> Path:
    """Input `x` comes back as `x_out`; those in `missing` may be NaN, and are in the golden request."""
    inputs = [helper.make_tensor_value_info(name, ONNX_TYPES[kind], shape) for name, (kind, shape) in specs.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", ONNX_TYPES[k], shape) for name, (k, shape) in specs.items()]
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in specs]
    signature = _signature(
        [
            TensorSpec(name=name, datatype=kind, shape=shape, allows_missing=name in missing)
            for name, (kind, shape) in specs.items()
        ],
        [TensorSpec(name=f"{name}_out", datatype=kind, shape=shape) for name, (kind, shape) in specs.items()],
    )
    given = {name: sample(kind, shape) for name, (kind, shape) in specs.items()}
    for name in missing:
        given[name][0, 0] = np.nan
    found = {f"{name}_out": array for name, array in given.items()}
    graph = helper.make_graph(nodes, "same", inputs, outputs)
    return _write(path, graph, signature, Golden(given, found, [], [], rtol=0, atol=0), seal)


def build_constant(path: Path, number: float, seal: Callable[[Path], str]) -> Path:
    """Takes nothing and gives one number."""
    node = helper.make_node("Constant", [], ["y"], value_float=number)
    graph = helper.make_graph([node], "constant", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])])
    golden = Golden({}, {"y": np.array(number, np.float32)}, [], [], rtol=0, atol=0)
    return _write(path, graph, _signature([], [TensorSpec(name="y", datatype="FP32", shape=())]), golden, seal)


def _signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Signature:
    return Signature(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        codec="NoCodec",
        limits=Limits(max_batch_size=16, max_body_bytes=1_000_000),
        runtime=Runtime(provider="cpu", threads=1),
    )


def _write(path: Path, graph: Any, signature: Signature, golden: Golden, seal: Callable[[Path], str]) -> Path:
    path.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path / "model.onnx")
    (path / "codec.py").write_text(CODEC)
    (path / "card.md").write_text("# same\n")
    write_json(path / "signature.json", signature.model_dump())
    golden.write(path)
    seal(path)
    return path
