"""A bundle small enough to break byte by byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json

SIGNATURE = Signature(
    inputs=(TensorSpec(name="pair", datatype="FP32", shape=("batch", 2)),),
    outputs=(TensorSpec(name="score", datatype="FP32", shape=("batch", 1)),),
    codec="Codec",
    limits=Limits(max_batch_size=8, max_body_bytes=1024),
    runtime=Runtime(provider="cpu", threads=1),
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A sealed bundle; its model is only bytes, because no test runs it."""
    directory = tmp_path / "bundle"
    (directory / "weights").mkdir(parents=True)
    (directory / "model.onnx").write_bytes(b"graph")
    (directory / "weights" / "part.bin").write_bytes(b"\x00\x01")
    (directory / "codec.py").write_text("class Codec: ...\n")
    (directory / "card.md").write_text("# pairs\n")
    write_json(directory / "signature.json", SIGNATURE.model_dump())
    pair, score = np.ones((2, 2), np.float32), np.zeros((2, 1), np.float32)
    Golden({"pair": pair}, {"score": score}, [[1, 2]], [{"score": 0.5}], 1e-3, 1e-4).write(directory)
    seal(directory)
    return directory


def seal(directory: Path) -> str:
    onnx = digest_file(directory / "model.onnx")
    return write_manifest(
        directory, "pairs", "pass", Ancestors(code="c", data="d", checkpoint="w", verdict="v", onnx=onnx)
    )
