from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.spec.data import Samples
from pipeline.spec.errors import DataError
from pipeline.spec.rank import Rank
from pipeline.spec.sections import Train
from train.group import Group
from train.objective import Objective
from train.precision import Precision
from train.strategy import Alone
from train.validation import validate

CPU = torch.device("cpu")


class Echo:
    """Answers its input; the loss of a sample is its value, so every mean is known."""

    inputs = ("x",)
    outputs = ("y",)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"square": outputs[:, 0] ** 2}


def run(values: list[float], size: int, task: Any = None, model: nn.Module | None = None) -> dict[str, float]:
    samples = Samples("validation", {"x": torch.tensor(values)[:, None]})
    task = task or Echo()
    group = Group(Rank(), CPU)
    strategy = Alone(model or nn.Identity(), Objective(task, Precision("fp32", CPU)), group, Train())
    return validate(task, strategy, samples, group, size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_the_mean_is_over_samples_and_not_over_batches(size: int) -> None:
    assert run([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 28.0], size) == {
        "loss": pytest.approx(7.0),
        "square": pytest.approx(875 / 7),
    }


def test_the_model_is_judged_in_evaluation_mode_and_given_back_in_training_mode() -> None:
    model = nn.Sequential(nn.Dropout(0.9)).train()
    assert run([1.0] * 50, 10, model=model)["loss"] == 1.0
    assert model.training


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(DataError, match="the validation loss is"):
        run([1.0, value], 1)


def test_a_metric_that_is_no_value_per_sample_is_named() -> None:
    class Averaged(Echo):
        def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"square": outputs.mean()}

    with pytest.raises(DataError, match="square must have one value per sample"):
        run([1.0, 2.0], 2, task=Averaged())
