from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.contract.data import Samples
from train.device.memory_format import accepts_formats, choose_input_formats, convert_inputs, formats_of_layers
from train.optim import Precision
from train.parallel.base import Objective

CPU, LAST = torch.device("cpu"), torch.channels_last


class Viewing(nn.Module):
    """Depends on the order of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.convolution(x))
        return self.head(hidden.view(len(x), -1))  # type: ignore[no-any-return]


class Pictures:
    inputs = ("x",)
    outputs = ("scores",)

    def __init__(self, views: bool = False) -> None:
        self.views = views

    def model(self) -> nn.Module:
        if self.views:
            return Viewing()
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))

    def data(self, split: str) -> dict[str, Any]:
        pictures = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)
        return {"x": pictures, "target": pictures.mean(axis=(1, 2, 3)), "mask": pictures}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs.mean(dim=1) - batch["target"]).square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def batch() -> dict[str, Tensor]:
    return Samples("train", Pictures().data("train")).batch(range(6))


def test_formats_are_those_of_the_convolutions() -> None:
    assert formats_of_layers(nn.Sequential(nn.Linear(2, 2))) == {}
    assert formats_of_layers(nn.Sequential(nn.Conv2d(1, 1, 1))) == {4: LAST}
    both = nn.Sequential(nn.Conv3d(1, 1, 1), nn.Conv2d(1, 1, 1))
    assert formats_of_layers(both) == {4: LAST, 5: torch.channels_last_3d}


def test_only_inputs_with_numbers_are_converted() -> None:
    columns = {**batch(), "ids": torch.zeros(2, 3, 4, 4, dtype=torch.long), "flat": torch.zeros(2, 3)}
    converted = convert_inputs(columns, ("x", "ids", "flat"), {4: LAST})
    in_format = {
        name: tensor.is_contiguous(memory_format=LAST) for name, tensor in converted.items() if tensor.ndim == 4
    }
    assert in_format == {"x": True, "mask": False, "ids": False}
    assert all(torch.equal(converted[name], tensor) for name, tensor in columns.items())


def test_weights_and_gradients_keep_their_layout() -> None:
    torch.manual_seed(0)
    task: Any = Pictures()
    model, found = task.model(), []
    for formats in ({}, {4: LAST}):
        loss = Objective(task, Precision("fp32", CPU), formats).loss(model, batch())
        model.zero_grad()
        torch.autograd.backward(loss)
        found.append(loss.item())
        for parameter in model.parameters():
            assert parameter.is_contiguous()
            assert parameter.grad is not None
            assert parameter.grad.is_contiguous()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("views", [False, True])
def test_model_that_depends_on_memory_order_is_detected_unchanged(views: bool) -> None:
    task: Any = Pictures(views)
    model = task.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = Samples("train", task.data("train"))
    assert accepts_formats(model, task, samples, {4: LAST}, CPU) is not views
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_formats_are_chosen_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def choose(views: bool, device: torch.device) -> object:
        task: Any = Pictures(views)
        samples = Samples("train", task.data("train"))
        return choose_input_formats(task.model(), task, samples, device, logs=True)

    gpu = torch.device("cuda", 0)
    assert choose(True, CPU) == {}
    monkeypatch.setattr("train.device.memory_format.accepts_formats", lambda model, *_: not isinstance(model, Viewing))
    assert choose(False, gpu) == {4: LAST}
    assert capsys.readouterr().out == ""
    assert choose(True, gpu) == {}
    assert "call flatten() or reshape() instead" in capsys.readouterr().out
