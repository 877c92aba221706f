"""Bundles and images that the suite deploys: `python -m tests.cluster.images NAME` builds them and prints their names.

All bundles have the same model, which doubles its input. `slow` gives the right answers, but later than `stable`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from k8s.images import build
from k8s.images.modelcar import bundle_annotations
from pipeline.contract.bundle import Ancestors, Bundle, open_bundle, write_manifest
from pipeline.contract.files import digest_file, write_json
from pipeline.contract.golden import Golden
from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.contract.sources import SOURCE_ROOT

NAME = "twice"
PAUSE_SECONDS = {"stable": 0.0, "candidate": 0.0, "slow": 0.5}
_TAG_DIGITS = 12
BASE_IMAGE = "python:3.11-slim"
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


def make_bundle(directory: Path, version: str) -> Bundle:
    """Write a bundle; the same version has the same digest wherever it is written."""
    directory.mkdir(parents=True)
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
    (directory / "codec.py").write_text(_CODEC.format(pause=PAUSE_SECONDS[version]))
    (directory / "card.md").write_text(f"# {NAME} ({version})\n")
    digest = digest_file(directory / "model.onnx")
    write_manifest(directory, NAME, "pass", Ancestors(code="a", data="b", checkpoint="c", verdict="d", onnx=digest))
    return open_bundle(directory)


def image_name(name: str, bundle: Bundle) -> str:
    return f"{name}:{bundle.digest[:_TAG_DIGITS]}"


def build_images(name: str) -> None:
    """Build all images; only their names go to standard output."""
    search = build.find_builder("auto", os.environ)
    if search.builder is None:
        raise SystemExit(f"no image builder: {search.reason}")
    wheels = SOURCE_ROOT / "wheels"
    recipe = build.Recipe(BASE_IMAGE, "cpu", wheels if wheels.is_dir() else None)
    with tempfile.TemporaryDirectory() as folder:
        for version in PAUSE_SECONDS:
            bundle = make_bundle(Path(folder, version, "bundle"), version)
            context, image = Path(folder, version, "context"), image_name(name, bundle)
            build.write_context(bundle, recipe, context)
            request = build.BuildRequest(image, context, bundle_annotations(bundle))
            with contextlib.redirect_stdout(sys.stderr):
                result = build.build(search.builder, request, Path(folder, version, "id"), os.environ)
            if result.image_digest is None:
                raise SystemExit(f"{image}: {result.last_line}")
            print(image)


if __name__ == "__main__":
    build_images(*sys.argv[1:])
