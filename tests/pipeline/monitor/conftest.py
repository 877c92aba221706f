"""A tiny classifier with a prepared, evaluated and exported run, and the files that its service would write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.contract.config import Config
from pipeline.contract.run import Run, RunFile, StepRecord
from pipeline.contract.samples import Label, Sample, SampleFolder, label_table, sample_table
from pipeline.evaluate.__main__ import evaluate
from pipeline.history import write_record, write_run
from pipeline.monitor.look import Monitor, Report
from pipeline.statistics.aggregates import Floats
from pipeline.steps.prepare import prepare
from pipeline.system.files import digest_mapping, digest_tree
from tests.weights import save_weights

from ..evaluate.conftest import CODEC, WEIGHTS, write_bundle

# Two numbers in; the class is the index of the greater one, but for noise.
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
        random = np.random.default_rng(len(split))
        pair = random.normal(size=(4000, 2)).astype(np.float32)
        return {"pair": pair, "label": pair.argmax(axis=1) ^ (random.random(4000) < 0.05)}

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        right = (outputs.argmax(dim=1) == batch["label"]).float()
        return {"accuracy": right, "margin": outputs[:, 1] * right}

    def predicted(self, outputs):
        return outputs.argmax(dim=1)

    def actual(self, batch):
        return batch["label"]

    def probabilities(self, outputs):
        return outputs.softmax(dim=1)
"""


@dataclass
class Live:
    """A project with a run, and the folder to which its service writes."""

    root: Path
    run: Run
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    clock: float = 1_700_000_000.0
    count: int = 0

    @property
    def folder(self) -> SampleFolder:
        return SampleFolder(str(self.root / "live"))

    @property
    def bundle(self) -> str:
        return self.run.bundle().digest

    def samples(self, pairs: Floats, rows: int = 1, bundle: str = "") -> list[Sample]:
        """Return requests with so many instances each, one second after another."""
        made = []
        for start in range(0, len(pairs), rows):
            self.clock, self.count = self.clock + 1, self.count + 1
            arrays = pairs[start : start + rows].astype(np.float32)
            inputs, outputs = {"pair": arrays}, {"scores": arrays}
            about = (f"r{self.count}", self.clock, bundle or self.bundle, 0.01)
            made.append(Sample(*about, range(len(arrays)), len(arrays), inputs, outputs))
        return made

    def normal(self, count: int, shift: float = 0.0) -> Floats:
        return np.asarray(self.random.normal(size=(count, 2)) + np.array([shift, 0.0]))

    def labels(self, samples: list[Sample], wrong: float = 0.05) -> list[Label]:
        """Return the labels of requests with one instance, in the order of the requests."""
        right = [int(sample.inputs["pair"][0].argmax()) for sample in samples]
        flips = self.random.random(len(samples)) < wrong
        return [
            Label(sample.id, sample.time + 60, str(label ^ int(flip)))
            for sample, label, flip in zip(samples, right, flips, strict=True)
        ]

    def write(self, samples: list[Sample], labels: list[Label] | None = None) -> None:
        if samples:
            self.folder.write("samples", sample_table(samples))
        if labels:
            self.folder.write("labels", label_table(labels))

    def config(self, **monitor: Any) -> Config:
        names = {"name": "greater", "task": "task.py:Greater", "codec": "codec.py:Codec"}
        return Config.model_validate({**names, "monitor": monitor})

    def monitor(self, **settings: Any) -> Monitor:
        return Monitor(self.run, self.run.bundle(), self.root, self.config(**settings))

    def look(self, *labels: Path, **settings: Any) -> Report:
        return self.monitor(**settings).look(self.folder, labels)


def make_live(root: Path, task: str = TASK, name: str = "20260101-000000-aaaa") -> Live:
    (root / "task.py").write_text(task)
    (root / "codec.py").write_text(CODEC)
    config = "name: greater\ntask: task.py:Greater\ncodec: codec.py:Codec\n"
    (root / "pipe.yaml").write_text(config)
    run = Run(root / "runs" / name)
    sections = {"evaluate": {"rule": "non-inferior", "margin": 0.1}, "prepare": {"leaks": "off", "columns": "off"}}
    values = {"name": "greater", "task": "task.py:Greater", "codec": "codec.py:Codec", **sections}
    run.path.mkdir(parents=True)
    write_run(run, RunFile(id=run.id, created="2026-01-01", wanted=("export",), config=values, environment={}))
    for step in ("prepare", "train", "evaluate"):
        run.partial(step).mkdir()
    prepare(run, root)
    run.partial("prepare").rename(run.output("prepare"))
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.tensor(WEIGHTS["right"])
    save_weights(model.state_dict(), run.partial("train") / "model.safetensors")
    run.partial("train").rename(run.output("train"))
    evaluate(run, root)
    run.partial("evaluate").rename(run.output("evaluate"))
    export(run, "right")
    return Live(root, run)


def export(run: Run, weights: str) -> None:
    run.bundle_path.mkdir(parents=True)
    write_bundle(run.bundle_path, WEIGHTS[weights], "pair")
    outputs = digest_tree(run.output("export"))
    record = StepRecord(
        step="export", status="done", key="k", parts={}, outputs=outputs, digest=digest_mapping(outputs)
    )
    write_record(run, record)


def add_run(live: Live, weights: str) -> Run:
    """Add a run that differs in its bundle only."""
    run = Run(live.run.runs / f"20260102-000000-{weights}")
    shutil.copytree(live.run.path, run.path, ignore=shutil.ignore_patterns("export"))
    write_run(run, live.run.read().model_copy(update={"id": run.id, "steps": {}}))
    export(run, weights)
    return run


MakeLive = Callable[[str], Live]


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return make_live(tmp_path)
