"""Code of docs/your-own-model.md that no project of the document contains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.contract.run import Run
from pipeline.steps.check import check
from pipeline.system.sources import SOURCE_ROOT

from ..pipeline.records import write_run_file

TASK = """
import numpy as np
import torch
from graph_codec import NODES, GraphCodec
from graph_net import GraphNet
from torch.nn import functional


def graph(random):
    size = int(random.integers(2, NODES))
    nodes = random.standard_normal((size, 3)).round(3)
    return {"nodes": nodes.tolist(), "edges": random.integers(0, size, (size, 2)).tolist()}


class Graphs:
    inputs = ("nodes", "edges", "mask")
    outputs = ("scores",)

    def model(self):
        return GraphNet()

    def data(self, split):
        random = np.random.default_rng(len(split))
        return {**GraphCodec().decode([graph(random) for _ in range(40)]), "label": random.integers(0, 2, 40)}

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch["label"])

    def metrics(self, outputs, batch):
        return {"accuracy": (outputs.argmax(1) == batch["label"]).float()}

    def example(self):
        return [{"nodes": [[1, 2, 3], [4, 5, 6]], "edges": [[0, 1]]}]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The files of the recipe for graphs."""
    text = (SOURCE_ROOT / "docs" / "your-own-model.md").read_text()
    for name, body in re.findall(r"^```python\n# file: (graph_\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(body)
    return tmp_path


def test_recipe_for_graphs_goes_through_the_whole_pipeline(recipe: Path) -> None:
    (recipe / "task.py").write_text(TASK)
    run = Run(recipe / "runs" / "run")
    run.partial("check").mkdir(parents=True)
    write_run_file(
        run, "check", task="task.py:Graphs", codec="graph_codec.py:GraphCodec", evaluate={"metric": "accuracy"}
    )
    check(run, recipe)
    assert (run.partial("check") / "check.json").is_file()
