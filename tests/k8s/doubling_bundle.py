"""The bundle of a model that doubles its input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from pipeline.contract.bundle import Ancestors, Bundle, open_bundle, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

NAME = "twice"
_CODEC = """
import time

import numpy as np


class C:
    def decode(self, instances):
        time.sleep({pause})
        return {{"x": np.asarray(instances, np.float32)}}

    def encode(self, outputs):
        return outputs["y"].tolist()
"""


def make_bundle(directory: Path, *, card: str = NAME, pause_seconds: float = 0.0, codec: str = "") -> Bundle:
    """Write a bundle; with the same arguments it has the same digest wherever it is written."""
    directory.mkdir(parents=True, exist_ok=True)
    row = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], NAME, row[:1], row[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="tests")
    onnx.save(model, directory / "model.onnx")
    specs = {name: TensorSpec(name=name, datatype="FP32", shape=("batch", 2)) for name in ("x", "y")}
    signature = Signature(
        inputs=(specs["x"],),
        outputs=(specs["y"],),
        codec="C",
        limits=Limits(max_batch_size=8, max_body_bytes=1024),
        runtime=Runtime(provider="cpu", threads=1),
    )
    write_json(directory / "signature.json", signature.model_dump())
    x = np.array([[1, 2], [3, 4]], np.float32)
    Golden({"x": x}, {"y": 2 * x}, x.tolist(), (2 * x).tolist(), rtol=1e-3, atol=1e-4).write(directory)
    (directory / "codec.py").write_text(codec or _CODEC.format(pause=pause_seconds))
    (directory / "card.md").write_text(f"# {card}\n")
    digest = digest_file(directory / "model.onnx")
    write_manifest(directory, NAME, "pass", Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx=digest))
    return open_bundle(directory)
