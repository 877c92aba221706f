"""Torch's own outputs are checked before a file is called wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from export.checks.verify import find_nondeterminism
from pipeline.contract.data import open_split
from pipeline.contract.settings.stages import Export

from .conftest import Small, linear, pairs


def reasons(net: nn.Module) -> str:
    task: Any = Small(net.eval(), pairs())
    return find_nondeterminism(task, net, open_split(task, "test"), Export())


class Beside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x[:, :1] + 2.0).sqrt()


class Restless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


def test_deterministic_model_has_no_nondeterminism() -> None:
    assert reasons(linear()) == ""


def test_output_that_depends_on_the_batch_is_named() -> None:
    assert "`y` for a sample depends on the other samples in the batch" in reasons(Beside())


def test_first_sample_with_nan_is_named() -> None:
    first = int((Roots()(torch.from_numpy(pairs()["x"])).isnan().any(1)).nonzero()[0])
    assert f"returns NaN in `y` for test sample {first}" in reasons(Roots())


def test_random_outputs_are_named() -> None:
    assert "returns different values of `y` for the same input" in reasons(Restless())
