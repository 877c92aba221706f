from __future__ import annotations

import pytest
import torch
from torch import nn

from train.optimizer import make_optimizer
from train.precision import Precision

CPU = torch.device("cpu")


def test_what_was_counted_and_the_scale_go_on_in_a_resumed_run() -> None:
    first, second = Precision("fp16", CPU), Precision("fp16", CPU)
    model = nn.Linear(2, 1)
    optimizer = make_optimizer(model, "sgd", 0.0)
    first.backward(model(torch.full((1, 2), 1e36)).sum())  # times the loss scale: more than a float holds
    first.unscale(optimizer)
    first.step(optimizer)
    first.overflows += 1
    second.restore(first.state())
    assert second.told() == first.told() == {"loss_scale": 2.0**15, "overflow_steps": 1}


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_what_is_not_scaled_has_nothing_to_keep_or_tell(kind: str) -> None:
    made = Precision(kind, CPU)  # type: ignore[arg-type]
    assert made.state() == made.told() == {}
