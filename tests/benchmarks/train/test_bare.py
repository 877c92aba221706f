from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.train.bare import bare
from benchmarks.train.gate import Finished
from benchmarks.train.ours import ours
from benchmarks.train.workloads import Convolution, Workload
from pipeline.system.processes import Rank

STEPS = 21


class Kept(Convolution):
    """A task with fixed initial weights for both loops, which keeps the model it made."""

    made: list[nn.Module]

    def __init__(self) -> None:
        self.made = []

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 10))
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01) if parameter.ndim == 1 else nn.init.eye_(parameter.flatten(1))
        self.made.append(model)
        return model


def trained(loop: Callable[..., None], folder: Path) -> dict[str, Tensor]:
    """Return the weights after some steps of one loop."""
    task, laps = Kept(), iter(range(STEPS))

    def gate() -> None:
        if next(laps, None) is None:
            raise Finished

    folder.mkdir()
    try:
        with pytest.raises(Finished):
            loop(Workload(lambda: task, batch_size=8, lap=1), Rank(), gate, folder)
    finally:
        torch.use_deterministic_algorithms(False)
    return task.made[0].state_dict()


def test_bare_loop_and_ours_train_the_same_weights(tmp_path: Path) -> None:
    """Otherwise their speeds could not be compared."""
    left, right = trained(bare, tmp_path / "bare"), trained(ours, tmp_path / "ours")
    for name, tensor in left.items():
        assert right[name].allclose(tensor, rtol=1e-4, atol=1e-6), name
    assert "loss" in json.loads((tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()[0])
