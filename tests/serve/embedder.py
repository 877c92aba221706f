"""A sealed bundle that embeds texts: the sum of the vectors of a text's bytes, of length 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, TensorSpec
from tests.serve.bundles import signature, write

SIZE, VOCABULARY = 8, 256
CODEC = """
import numpy as np

from pipeline import InvalidPayload


class C:
    embeddings = True
    dimensions = (2, 4)

    def decode(self, instances):
        rows = [list(one.encode()) if isinstance(one, str) else one for one in instances]
        if not all(rows):
            raise InvalidPayload("instances: each must be a text")
        ids = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
        for i, row in enumerate(rows):
            ids[0, i, : len(row)], ids[1, i, : len(row)] = row, 1
        return {"input_ids": ids[0], "attention_mask": ids[1]}

    def encode(self, outputs):
        return outputs["vectors"].tolist()
"""
WEIGHT = np.random.default_rng(5).normal(size=(VOCABULARY, SIZE)).astype(np.float32)


def vector(text: str) -> Any:
    total = WEIGHT[list(text.encode())].sum(axis=0)
    return total / np.linalg.norm(total)


def build(path: Path, shortest: int = 1) -> Path:
    nodes = [
        helper.make_node("Gather", ["weight", "input_ids"], ["tokens"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["tokens", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["total"], keepdims=0),
        helper.make_node("LpNormalization", ["total"], ["vectors"], axis=1, p=2),
    ]
    axes = ("last", [2]), ("middle", [1])
    weights = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in axes]
    weights.append(numpy_helper.from_array(WEIGHT, "weight"))
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in names]
    outputs = [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["batch", SIZE])]
    graph = helper.make_graph(nodes, "embed", inputs, outputs, weights)
    specs = [TensorSpec(name=name, datatype="INT64", shape=("batch", "length")) for name in names]
    vectors = TensorSpec(name="vectors", datatype="FP32", shape=("batch", SIZE))
    limits = Limits(max_batch_size=4, max_body_bytes=100_000, axes={"length": 20}, shortest={"length": shortest})
    ids = np.array([list(b"hello"), list(b"world")])
    golden = np.stack([vector("hello"), vector("world")])
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    answers = Golden(arrays, {"vectors": golden}, ["hello"], [golden[0].tolist()], rtol=1e-3, atol=1e-4)
    return write(path, graph, signature(specs, [vectors], "C", limits), answers, CODEC)
