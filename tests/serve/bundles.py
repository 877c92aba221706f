"""Small sealed bundles, made by hand."""

from __future__ import annotations

from collections.abc import Callable
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

TOO_BRIGHT = 100  # a value from which on the model itself fails
LIMITS = Limits(max_batch_size=16, max_body_bytes=100_000)

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


def _model(path: Path, seed: int) -> None:
    """logits = flatten(image) @ weight, with weights that are hard to guess; fails on a value beyond TOO_BRIGHT."""
    weight = np.random.default_rng(seed).normal(size=(64, 10)).astype(np.float32)
    zeros = np.zeros(TOO_BRIGHT, np.float32)
    graph = helper.make_graph(
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
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def _signature(codec: str) -> Signature:
    return Signature(
        inputs=(TensorSpec(name="image", datatype="FP32", shape=("batch", 1, 8, 8)),),
        outputs=(TensorSpec(name="logits", datatype="FP32", shape=("batch", 10), labels=tuple("0123456789")),),
        codec=codec,
        limits=LIMITS,
        runtime=Runtime(provider="cpu", threads=1),
    )


def _golden(path: Path, instances: list[Any], predictions: Callable[[Any], list[Any]]) -> None:
    image = np.random.default_rng(3).random((2, 1, 8, 8)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    pictures = np.array([one["image"] if isinstance(one, dict) else one for one in instances], np.float32)[:, None]
    Golden(
        inputs={"image": image},
        outputs={"logits": session.run(None, {"image": image})[0]},
        instances=instances,
        predictions=predictions(
            session.run(None, {"image": pictures / (1 if isinstance(instances[0], dict) else 16)})[0]
        ),
        rtol=1e-3,
        atol=1e-4,
    ).write(path)


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


def build(
    path: Path,
    codec: str,
    source: str,
    instances: list[Any],
    predictions: Callable[[Any], list[Any]],
    seed: int = 7,
) -> Path:
    """Bundles of other seeds answer otherwise."""
    path.mkdir(parents=True)
    _model(path / "model.onnx", seed)
    (path / "codec.py").write_text(source)
    (path / "card.md").write_text("# tiny\n")
    write_json(path / "signature.json", _signature(codec).model_dump())
    _golden(path, instances, predictions)
    seal(path)
    return path
