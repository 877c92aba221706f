"""A table with missing numbers, accepted in prepare, is served over every protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.api import Bundle
from pipeline.service.process import read_live

from .project_folder import ProjectFolder

TASK = """
import numpy as np
import torch
from codec import HouseCodec
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.price = nn.Linear(4, 1)

    def forward(self, numbers):
        missing = torch.isnan(numbers)
        price = self.price(torch.cat([torch.nan_to_num(numbers), missing.float()], dim=1))[:, 0]
        return price, numbers[:, 0] / 2


class Houses:
    inputs = ("numbers",)
    outputs = ("price", "half")

    def model(self):
        return Net()

    def data(self, split):
        size, seed = {"train": (200, 0), "validation": (60, 1), "test": (60, 2)}[split]
        random = np.random.default_rng(seed)
        numbers = random.uniform(-1, 1, (size, 2))
        price = 2 * numbers[:, 0] - numbers[:, 1]
        numbers[10::9, 0] = np.nan
        instances = [[None if np.isnan(number) else number for number in row] for row in numbers.tolist()]
        return {**HouseCodec().decode(instances), "price": price.astype(np.float32)}

    def loss(self, outputs, batch):
        return functional.mse_loss(outputs["price"], batch["price"])

    def metrics(self, outputs, batch):
        return {"negative_squared_error": -((outputs["price"] - batch["price"]) ** 2)}

    def example(self):
        return [[None, 0.25], [0.5, -0.5]]
"""
CODEC = """
import numpy as np


class HouseCodec:
    def decode(self, instances):
        return {"numbers": np.array(instances, dtype=np.float32)}  # None becomes NaN

    def encode(self, outputs, inputs):
        rows = zip(outputs["half"].tolist(), np.isnan(inputs["numbers"]).tolist(), strict=True)
        return [{"half": half, "missing": missing} for half, missing in rows]
"""
SETTINGS = """
name: houses
task: task.py:Houses
codec: codec.py:HouseCodec
prepare: {missing_share: 0.2}
train: {epochs: 1, batch_size: 40, lr: 0.02}
evaluate: {metric: negative_squared_error}
export: {batch_sizes: [1, 3]}
"""
ANSWERS = [{"half": None, "missing": [True, False]}, {"half": 0.25, "missing": [False, False]}]


@pytest.mark.long
def test_missing_numbers_reach_the_model_over_every_protocol(tmp_path: Path) -> None:
    for name, text in (("task.py", TASK), ("codec.py", CODEC), ("pipe.yaml", SETTINGS)):
        (tmp_path / name).write_text(text)
    project = ProjectFolder.with_free_port(tmp_path)
    with project.served():
        _check(project)


def _check(project: ProjectFolder) -> None:
    instances: list[Any] = [[None, 0.25], [0.5, -0.5]]
    assert project.request("/v1/models/houses:predict", {"instances": instances})[2]["predictions"] == ANSWERS
    (project.folder / "rows.json").write_text(json.dumps([[float("nan"), 0.25], [0.5, -0.5]]))
    for words in ((), ("rows.json",)):
        answer = json.loads(project.pipe("predict", *words, "-o", "json").stdout)["predictions"]
        assert answer == ANSWERS[: len(answer)]
    rows = np.array([[np.nan, 0.25]], np.float32)
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 2]}
    infer = {"inputs": [{**tensor, "data": [None, 0.25]}], "outputs": [{"name": "half"}]}
    assert project.request("/v2/models/houses/infer", infer)[2]["outputs"][0]["data"] == [None]
    live = read_live(project.runs)
    assert live is not None
    with grpc.insecure_channel(f"127.0.0.1:{live.grpc_port}") as channel:
        request = pb.ModelInferRequest(model_name="houses", inputs=[tensor], raw_input_contents=[rows.tobytes()])
        answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    assert np.isnan(np.frombuffer(answer.raw_output_contents[1], np.float32)).all()
    run = project.latest
    assert np.isnan(run.bundle().golden().inputs["numbers"]).any()
    assert np.isnan(Bundle.load(run.bundle_path).predict(instances)[0]["half"])
    assert "golden requests are answered as at export" in project.pipe("verify").stdout
