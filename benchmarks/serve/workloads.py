"""Workloads: each net as a bundle, and one request for it in each wire format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.serve import nets
from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

Array = np.ndarray[Any, Any]
NAME = "net"  # of the model, in every URL

_CODEC = """import numpy as np

class RowsCodec:
    def decode(self, instances):
        return {{"x": np.array(instances, np.{kind})}}

    def encode(self, outputs):
        return outputs["logits"].tolist()
"""


@dataclass(frozen=True)
class Workload:
    name: str
    build: Callable[[Path], None]
    shape: tuple[int, ...]
    datatype: str
    kind: str  # numpy's name of the datatype
    top: int  # the largest value, before floats are scaled to 1
    classes: int
    threads: int  # inside one inference

    @property
    def request(self) -> Array:
        """Return one row, the same for all contenders."""
        values = np.random.default_rng(1).integers(0, self.top, (1, *self.shape), endpoint=True)
        return values if self.datatype == "INT64" else (values / self.top).astype(np.float32)

    def json_v1(self) -> bytes:
        return json.dumps({"instances": self.request.tolist()}, separators=(",", ":")).encode()

    def json_v2(self) -> bytes:
        tensor = {
            "name": "x",
            "shape": [1, *self.shape],
            "datatype": self.datatype,
            "data": self.request.ravel().tolist(),
        }
        return json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()

    def binary_v2(self) -> tuple[bytes, int]:
        """Return the body, and the length of the JSON it begins with."""
        raw = self.request.tobytes()
        tensor = {"name": "x", "shape": [1, *self.shape], "datatype": self.datatype}
        body = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(raw)}}]}
        head = json.dumps({"parameters": {"binary_data_output": True}, **body}, separators=(",", ":")).encode()
        return head + raw, len(head)

    def bundle(self, folder: Path) -> Path:
        """Write the bundle to `folder`, which must not exist yet."""
        folder.mkdir(parents=True)
        self.build(folder / "model.onnx")
        (folder / "codec.py").write_text(_CODEC.format(kind=self.kind))
        (folder / "card.md").write_text(f"# {self.name}\n\nRandom weights, to measure a service with.\n")
        signature = Signature(
            inputs=(TensorSpec(name="x", datatype=self.datatype, shape=("batch", *self.shape)),),
            outputs=(TensorSpec(name="logits", datatype="FP32", shape=("batch", self.classes)),),
            codec="RowsCodec",
            limits=Limits(max_batch_size=64, max_body_bytes=16 << 20),
            runtime=Runtime(provider="cpu", threads=self.threads),
        )
        write_json(folder / "signature.json", signature.model_dump())
        self._golden(folder)
        ancestors = Ancestors(code="", data="", checkpoint="", verdict="", onnx=digest_file(folder / "model.onnx"))
        write_manifest(folder, NAME, "no-baseline", ancestors)
        return folder

    def _golden(self, folder: Path) -> None:
        session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        logits = session.run(["logits"], {"x": self.request})[0]
        instances, predictions = self.request.tolist(), logits.tolist()
        Golden({"x": self.request}, {"logits": logits}, instances, predictions, rtol=1e-2, atol=1e-3).write(folder)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("digits", nets.digits, (1, 8, 8), "FP32", "float32", 16, 10, threads=1),
        Workload("conv", nets.conv, (3, 64, 64), "FP32", "float32", 255, 1000, threads=2),
        Workload("text", nets.text, (64,), "INT64", "int64", 8191, 2, threads=2),
    )
}
