"""Each metric that the documents name decides in the gate and in the comparison of variants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .project_folder import ProjectFolder

TASK = """
import torch
from torch import nn


class Line:
    inputs = ("x",)
    outputs = ("y",)
    directions = {"distance": "lower"}

    def model(self):
        return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        x = torch.rand(400, 3, generator=generator)
        value = x @ torch.tensor([1.0, -2.0, 3.0]) + 0.2 * torch.rand(400, generator=generator)
        return {"x": x, "value": value, "relevance": (value > 1).float(), "query": torch.arange(400) // 10}

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch["value"])

    def metrics(self, outputs, batch):
        return {"distance": (outputs - batch["value"]).abs()}

    def predicted(self, outputs):
        return outputs

    def actual(self, batch):
        return batch[self.label]

    def baseline(self):
        return lambda batch: batch["x"][:, 2]


class Regression(Line):
    label = "value"


class Ranking(Line):
    label = "relevance"

    def queries(self, batch):
        return batch["query"]
"""
CODEC = """
import numpy as np


class LineCodec:
    def decode(self, instances):
        return {"x": np.asarray(instances, dtype=np.float32)}

    def encode(self, outputs):
        return outputs["y"].tolist()
"""
SETTINGS = """
name: line
task: task.py:{task}
codec: codec.py:LineCodec
train: {{epochs: 20, lr: 0.1, processes: 1}}
evaluate: {{metric: distance, rule: non-inferior, margin: 0.3, require: {limits}}}
export: {{variants: [int8-dynamic], variant_margin: 0.2}}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "metrics", "limits", "unreachable"),
    [
        (
            "Regression",
            ["rmse", "mae", "r2", "spearman"],
            "{rmse: 0.6, mae: 0.6, r2: 0.5, spearman: 0.5}",
            "rmse: 0.001",
        ),
        ("Ranking", ["ndcg", "mrr", "auc"], "{ndcg: 0.6, mrr: 0.6, auc: 0.6}", "distance: 0.000001"),
    ],
)
def test_every_metric_can_decide(tmp_path: Path, task: str, metrics: list[str], limits: str, unreachable: str) -> None:
    for name, text in (
        ("task.py", TASK),
        ("codec.py", CODEC),
        ("pipe.yaml", SETTINGS.format(task=task, limits=limits)),
    ):
        (tmp_path / name).write_text(text)
    project = ProjectFolder(tmp_path, 0)
    for metric in ("distance", *metrics):
        project.pipe("run", "--until", "export", f"evaluate.metric={metric}")
        verdict = json.loads((project.latest.output("evaluate") / "verdict.json").read_text())
        assert (verdict["verdict"], verdict["metric"]) == ("pass", metric)
        assert verdict["difference"]["estimate"] >= 0, "positive is better, of errors too"
        variants = json.loads((project.latest.output("export") / "variants.json").read_text())
        assert [variant["metric"]["name"] for variant in variants] == [metric, metric]
        assert all(variant["passed"] for variant in variants), variants
    rejected = project.pipe("run", "--until", "export", f"evaluate.require={{{unreachable}}}", expect=3)
    assert "candidate rejected: " in rejected.stderr
