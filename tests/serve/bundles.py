"""Small sealed bundles, made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

TOO_BRIGHT = 100  # the model fails from this value on
LIMITS = Limits(max_batch_size=16, max_body_bytes=100_000)
CPU = Runtime(provider="cpu", threads=1)

# Waits for a file or fails when the instance requests it, so that a test decides when and where.
TRICKY = """
import time
from pathlib import Path
import numpy as np

class TrickyCodec:
    def decode(self, instances):
        for one in instances:
            while "gate" in one and not Path(one["gate"]).exists():
                time.sleep(0.005)
            if one.get("fail") == "decode":
                raise KeyError("a secret of the server")
        self.fail = any(one.get("fail") == "encode" for one in instances)
        return {"image": np.array([[one["image"]] for one in instances], np.float32)}

    def encode(self, outputs):
        if self.fail:
            raise RuntimeError("a secret of the server")
        return [int(row.argmax()) for row in outputs["logits"]]
"""


def _graph(seed: int) -> onnx.GraphProto:
    """Return logits = flatten(image) @ weight with random weights; the graph fails on values from TOO_BRIGHT on."""
    weight = np.random.default_rng(seed).normal(size=(64, 10)).astype(np.float32)
    zeros = np.zeros(TOO_BRIGHT, np.float32)
    return helper.make_graph(
        [
            helper.make_node("Flatten", ["image"], ["flat"]),
            helper.make_node("MatMul", ["flat", "weight"], ["product"]),
            helper.make_node("ReduceMax", ["flat"], ["brightest"], keepdims=0),
            helper.make_node("Cast", ["brightest"], ["index"], to=TensorProto.INT64),
            helper.make_node("Gather", ["zeros", "index"], ["zero"]),
            helper.make_node("Add", ["product", "zero"], ["logits"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(zeros, "zeros")],
    )


def signature(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    codec: str,
    limits: Limits = LIMITS,
    runtime: Runtime = CPU,
) -> Signature:
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs), codec=codec, limits=limits, runtime=runtime)


def _golden(session: Any, instances: list[Any], predictions: Callable[[Any], list[Any]]) -> Golden:
    image = np.random.default_rng(3).random((2, 1, 8, 8)).astype(np.float32)
    pictures = np.array([one["image"] if isinstance(one, dict) else one for one in instances], np.float32)[:, None]
    return Golden(
        inputs={"image": image},
        outputs={"logits": session.run(None, {"image": image})[0]},
        instances=instances,
        predictions=predictions(
            session.run(None, {"image": pictures / (1 if isinstance(instances[0], dict) else 16)})[0]
        ),
        rtol=1e-3,
        atol=1e-4,
    )


def digits(logits: Any) -> list[Any]:
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = scores / scores.sum(axis=1, keepdims=True)
    return [
        {"digit": int(row.argmax()), "probability": float(row.max()), "probabilities": row.tolist()} for row in shares
    ]


def seal(path: Path) -> str:
    (path / "manifest.json").unlink(missing_ok=True)
    onnx_digest = digest_file(path / "model.onnx")
    ancestors = Ancestors(code="c", data="d", checkpoint="k", verdict="v", onnx=onnx_digest)
    return write_manifest(path, "tiny", "pass", ancestors)


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def session(graph: onnx.GraphProto) -> Any:
    model = _model(graph).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def write(
    path: Path, graph: onnx.GraphProto, signature: Signature, golden: Golden, codec: str | None = None, **storage: Any
) -> Path:
    """Write and seal a bundle; `storage` is that of `onnx.save`, for weights beside the model."""
    path.mkdir(parents=True, exist_ok=True)
    onnx.save(_model(graph), path / "model.onnx", **storage)
    if codec is not None:
        (path / "codec.py").write_text(codec)
    (path / "card.md").write_text(f"# {graph.name}\n")
    write_json(path / "signature.json", signature.model_dump())
    golden.write(path)
    seal(path)
    return path


def build(
    path: Path, codec: str, source: str, instances: list[Any], predictions: Callable[[Any], list[Any]], seed: int = 7
) -> Path:
    """Write a bundle; each seed gives other weights."""
    graph = _graph(seed)
    image = TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 8, 8))
    logits = TensorSpec(name="logits", datatype="FP32", shape=("batch", 10), labels=tuple("0123456789"))
    golden = _golden(session(graph), instances, predictions)
    return write(path, graph, signature([image], [logits], codec), golden, source)
