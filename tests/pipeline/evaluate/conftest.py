"""A tiny classification project, its runs, and champions as real bundles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from pipeline.contract.bundle import Ancestors, write_manifest
from pipeline.contract.golden import Golden
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, change_registry
from pipeline.contract.run import Run
from pipeline.contract.signature import Cache, Generation, Limits, Runtime, Signature, TensorSpec
from pipeline.system.files import digest_file, write_json
from tests.weights import save_weights

from ..records import write_run_file

# Two numbers in; the class is the index of the greater one. WEIGHTS make models that are right, wrong, or constant.
TASK = """
import numpy as np
import torch
from torch import nn


class Greater:
    inputs = ("pair",)
    outputs = ("scores",)
    classes = ("first", "second")

    def model(self):
        return nn.Linear(2, 2, bias=False)

    def data(self, split):
        pair = np.random.default_rng(7).normal(size=(50, 2)).astype(np.float32)
        return {"pair": pair, "label": pair.argmax(axis=1)}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(dim=1) == batch["label"]).float()}

    def predicted(self, outputs):
        return outputs.argmax(dim=1)

    def actual(self, batch):
        return batch["label"]
"""

CODEC = """
import numpy as np


class Codec:
    def decode(self, instances):
        return {"pair": np.asarray(instances, np.float32)}

    def encode(self, outputs):
        return outputs["scores"].tolist()
"""

BASELINE = """
    def baseline(self):
        return lambda batch: batch["pair"]
"""

WEIGHTS = {
    "right": ((1.0, 0.0), (0.0, 1.0)),
    "wrong": ((0.0, 1.0), (1.0, 0.0)),
    "first": ((0.0, 0.0), (0.0, 0.0)),  # equal scores: argmax takes the first class always
}


@dataclass(frozen=True)
class Project:
    """A user's project folder with runs below it."""

    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def add(self, method: str) -> None:
        """Add a method to the task."""
        path = self.root / "task.py"
        path.write_text(path.read_text() + method)

    def replace(self, old: str, new: str) -> None:
        path = self.root / "task.py"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def run(self, answers: str, name: str = "one", **sections: Any) -> Run:
        """Make a run whose train step is complete, with the model of these answers."""
        run = Run(self.runs / name)
        run.output("train").mkdir(parents=True)
        run.partial("evaluate").mkdir()
        what_50_samples_can_show = {"rule": "non-inferior", "margin": 0.1}
        sections["evaluate"] = what_50_samples_can_show | sections.get("evaluate", {})
        names = {"name": "greater", "task": "task.py:Greater", "codec": "codec.py:Codec"}
        write_run_file(run, "evaluate", **{**names, **sections})
        model = nn.Linear(2, 2, bias=False)
        model.weight.data = torch.tensor(WEIGHTS[answers])
        save_weights(model.state_dict(), run.output("train") / "model.safetensors")
        return run

    def crown(
        self, answers: str, checkpoint: str = "other", inputs: str = "pair", cached: bool = False, test_set: str = ""
    ) -> Path:
        """Make a bundle with these answers the champion; return its folder."""
        bundle = self.runs / "old" / "export" / "bundle"
        bundle.mkdir(parents=True)
        digest = write_bundle(bundle, WEIGHTS[answers], inputs, cached, test_set)
        entry = Entry(bundle=digest, checkpoint=checkpoint, path="old/export/bundle")
        change_registry(self.runs, "", lambda _: ProposedChange(CHAMPION, entry, "test"))
        return bundle


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "codec.py").write_text(CODEC)
    return made


@pytest.fixture
def with_baseline(project: Project) -> Project:
    project.add(BASELINE)
    return project


KEPT = (("past.0.key", "past"), ("present.0.key", "total"))


def write_bundle(directory: Path, weights: Any, inputs: str, cached: bool = False, test_set: str = "") -> str:
    """A bundle of scores = pair · weightsᵀ; if `cached`, it takes and gives what a language model keeps."""
    kept = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1, axis, 4]) for name, axis in KEPT]
    matrix = numpy_helper.from_array(np.asarray(weights, np.float32).T, "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMul", [inputs, "weight"], ["scores"])]
        + [helper.make_node("Identity", [KEPT[0][0]], [KEPT[1][0]])] * cached,
        "linear",
        [helper.make_tensor_value_info(inputs, TensorProto.FLOAT, ["batch", 2]), *kept[:cached]],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 2]), *kept[1 : 1 + cached]],
        [matrix],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, directory / "model.onnx")
    specs = [TensorSpec(name=name, datatype="FP32", shape=("batch", 1, axis, 4)) for name, axis in KEPT]
    generation = Generation(
        ids=inputs, mask=inputs, positions=inputs, logits="scores", positions_limit=8,
        caches=(Cache(input=KEPT[0][0], output=KEPT[1][0]),),
    )  # fmt: skip
    signature = Signature(
        inputs=(TensorSpec(name=inputs, datatype="FP32", shape=("batch", 2)), *specs[:cached]),
        outputs=(TensorSpec(name="scores", datatype="FP32", shape=("batch", 2)), *specs[1 : 1 + cached]),
        generation=generation if cached else None,
        codec="Codec",
        limits=Limits(max_batch_size=8, max_body_bytes=1024),
        runtime=Runtime(provider="cpu", threads=1),
    )
    write_json(directory / "signature.json", signature.model_dump())
    Golden({}, {}, [], [], 1e-3, 1e-4).write(directory)
    (directory / "codec.py").write_text("class Codec: ...\n")
    (directory / "card.md").write_text("# greater\n")
    onnx_digest = digest_file(directory / "model.onnx")
    ancestors = Ancestors(code="c", data="d", checkpoint="other", verdict="v", onnx=onnx_digest, test_set=test_set)
    return write_manifest(directory, "greater", "pass", ancestors)
