"""A project whose files have the names of installed modules, through the whole pipeline, with a BERT-like model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .project_folder import ProjectFolder

FILES = {
    "task.py": """
import constants
import dataset
import optimizer
import profiler
from codec import Codec
from metrics import closeness
from model import Net
from torch.nn import functional
from train import SCALE


class Task:
    inputs, outputs = ("x",), ("y",)

    def model(self):
        return Net()

    def data(self, split):
        x, target = dataset.load(constants.COUNTS[split])
        return {**Codec().decode(x), "target": target * SCALE}

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"closeness": closeness(outputs, batch["target"])}

    def example(self):
        return [[1.0, 2.0], [0.5, -0.5], [0.0, 0.0]]
""",
    "codec.py": """
import numpy as np
import utils.scaling
from constants import NAME


class Codec:
    def decode(self, instances):
        return {"x": utils.scaling.scale(np.asarray(instances, dtype=np.float32))}

    def encode(self, outputs):
        return [{NAME: float(row[0])} for row in outputs["y"]]
""",
    "constants.py": "COUNTS = {'train': 64, 'validation': 21, 'test': 20}\nNAME = 'sum'\nFACTOR = 2\n",
    "utils/__init__.py": "",
    "utils/scaling.py": "from constants import FACTOR\n\n\ndef scale(x):\n    return x / FACTOR\n",
    "dataset.py": """
import numpy as np


def load(count):
    x = np.random.default_rng(count).normal(size=(count, 2)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)
""",
    "metrics.py": "def closeness(outputs, target):\n    return -(outputs - target).abs()[:, 0]\n",
    "model.py": """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.pooler = nn.Linear(2, 1), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(x)
""",
    "train.py": "SCALE = 1\n",
    "optimizer.py": "",
    "profiler.py": "",
    "pipe.yaml": """
name: names
task: task.py:Task
codec: codec.py:Codec
train: {epochs: 1, batch_size: 16, processes: 2, threads: 1}
evaluate: {metric: closeness}
export: {batch_sizes: [1, 3]}
package: {builder: none}
""",
}


@pytest.mark.long
def test_files_with_names_of_installed_modules_reach_the_service(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    project = ProjectFolder.with_free_port(tmp_path)
    with project.served():
        answers = json.loads(project.pipe("predict", "-o", "json").stdout)["predictions"]
        assert [set(answer) for answer in answers] == [{"sum"}] * 3
    log = (project.latest.path / "logs" / "train.log").read_text()
    assert "does not depend on 2 trained parameters: pooler.bias, pooler.weight" in log
    codec = project.latest.bundle_path / "codec"
    assert {path.relative_to(codec).as_posix() for path in codec.rglob("*.py")} == {
        "codec.py", "constants.py", "utils/__init__.py", "utils/scaling.py",
    }  # fmt: skip
    assert project.plan("export")["export"][0] == "reuse"
    (tmp_path / "utils" / "scaling.py").write_text("def scale(x):\n    return x / 3\n")
    assert "utils/scaling.py changed" in str(project.plan("export")["prepare"])
