"""A small classifier in torch, and the same in hand-written ONNX, since the exporter would take seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from pipeline.contract.config import Config, parse_config

Array = np.ndarray[Any, Any]

WIDE, INNER, CLASSES, COUNT = 16, 160, 8, 256


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, INNER), nn.ReLU(), nn.Linear(INNER, CLASSES)).eval()


class Hills:
    """A task whose labels are the outputs of the net itself, so that torch is always right."""

    inputs: Sequence[str] = ("x",)
    outputs: Sequence[str] = ("y",)

    def __init__(self, train: dict[str, Array] | None = None) -> None:
        self.train = train
        self.net = net()

    def model(self) -> nn.Module:
        return self.net

    def data(self, split: str) -> dict[str, Array]:
        if split == "train" and self.train is not None:
            return self.train
        x = np.random.default_rng(len(split)).normal(size=(4 * COUNT, WIDE)).astype(np.float32)
        with torch.no_grad():
            answers = self.net(torch.from_numpy(x)).numpy()
        first, second = np.sort(answers, axis=1)[:, -1], np.sort(answers, axis=1)[:, -2]
        sure = np.flatnonzero(first - second > 0.1)[:COUNT]  # like a trained net
        return {"x": x[sure], "label": answers[sure].argmax(axis=1)}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        mean: Tensor = outputs.mean()
        return mean

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(dim=1) == batch["label"]).float()}


def write(path: Path, external: bool = False) -> Path:
    """Write `net()` as the exporter would."""
    model = net()
    weights = [weight.detach().numpy() for weight in model.parameters()]
    tensors = [numpy_helper.from_array(array, f"weight{place}") for place, array in enumerate(weights)]
    nodes = [
        helper.make_node("Gemm", ["x", "weight0", "weight1"], ["before"], name="first", transB=1),
        helper.make_node("Relu", ["before"], ["hidden"], name="relu"),
        helper.make_node("Gemm", ["hidden", "weight2", "weight3"], ["y"], name="last", transB=1),
    ]
    return graph(path, nodes, tensors, WIDE, CLASSES, external)


def graph(
    path: Path, nodes: list[Any], tensors: list[Any], wide: int, narrow: int, external: bool = False
) -> Path:  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", wide), ("y", narrow))
    ]
    made = helper.make_graph(nodes, "main", ends[:1], ends[1:], tensors)
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def config(**export: Any) -> Config:
    """Return the settings for a test set that is too small for a margin of a hundredth."""
    values = {"name": "hills", "task": "task.py:Hills", "codec": "codec.py:Codec"}
    sizes = {"batch_sizes": [7, COUNT], "variant_margin": 0.05}
    evaluate = export.pop("evaluate", {})
    return parse_config({**values, "export": {**sizes, **export}, "evaluate": evaluate}, "a test")
