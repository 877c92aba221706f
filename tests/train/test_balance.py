from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pipeline.system.processes import Rank
from train.parallel.base import Stopwatch, Strategy, Traffic
from train.process_group import ProcessGroup
from train.trainer import BatchBalance, split_by_speed

from .conftest import Project, journal, weights

CPU = torch.device("cpu")
# The second process needs three times as long for a sample.
SLOW = """    def loss(self, outputs, batch):
        import os, time
        if torch.is_grad_enabled():
            time.sleep(len(batch["x"]) * (0.003 if os.environ["RANK"] == "1" else 0.001))
"""


@pytest.mark.parametrize("count", [2, 3, 7, 64, 1000])
@pytest.mark.parametrize("speeds", [[1.0, 1.0], [1.0, 3.0], [1e-9, 1.0], [5.0, 1.0, 1.0]])
def test_slices_by_speed_are_complete_and_not_empty(count: int, speeds: list[float]) -> None:
    found = split_by_speed(count, speeds)
    assert [i for part in found for i in part] == list(range(count))
    assert len(found) == len(speeds)
    assert count < len(speeds) or min(map(len, found)) >= 1


def test_slices_are_as_large_as_processes_are_fast() -> None:
    assert list(map(len, split_by_speed(400, [3.0, 1.0]))) == pytest.approx([300, 100], abs=1)
    assert list(map(len, split_by_speed(100, [1.0, 1.0]))) == [50, 50]


class Watched:
    """The attributes of a strategy that balancing reads."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.stopwatch = Stopwatch(CPU, self.traffic)


class Two(ProcessGroup):
    """The first of two processes; the other one does four samples a second."""

    def gather(self, value: Any) -> list[Any]:
        return [value, 4.0]


def balance(kind: Any, samples_per_second: float, steps: int) -> BatchBalance:
    strategy = Watched()
    made = BatchBalance(kind, Two(Rank(0, 0, 2), CPU), cast("Strategy", strategy))
    for _ in range(steps):
        strategy.traffic.compute_seconds += len(made.slice_of(100)) / samples_per_second
        made.observe(100)
    return made


def test_slices_follow_the_measured_speeds() -> None:
    made = balance("auto", samples_per_second=12.0, steps=100)
    assert len(made.slice_of(100)) == pytest.approx(75, abs=1)
    assert made.metrics() == {"batch_share": {"rank 0": pytest.approx(0.75), "rank 1": pytest.approx(0.25)}}


def test_slices_stay_equal_until_speeds_are_known() -> None:
    assert len(balance("auto", samples_per_second=12.0, steps=5).slice_of(100)) == 50


def test_equal_slices_stay_equal_and_are_not_reported() -> None:
    made = balance("equal", samples_per_second=12.0, steps=100)
    assert len(made.slice_of(100)) == 50
    assert made.metrics() == {}


def test_a_slower_process_gets_smaller_slices_with_exact_gradients(project: Project) -> None:
    project.replace('{"train": 37,', '{"train": 320,')
    project.replace("    def loss(self, outputs, batch):\n", SLOW)
    equal, auto = (
        project.run(kind, balance=kind, batch_size=32, epochs=2, log_every=5, lr=0.01) for kind in ("equal", "auto")
    )
    for run in (equal, auto):
        done = project.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    for name, tensor in weights(equal).items():
        torch.testing.assert_close(weights(auto)[name], tensor, rtol=1e-4, atol=1e-5)
    steps = {run.id: [line for line in journal(run) if "loss" in line] for run in (equal, auto)}
    last = steps["auto"][-1]
    assert last["batch_share"]["rank 0"] > 0.5
    assert sum(last["batch_share"].values()) == pytest.approx(1)
    assert "batch_share" not in steps["equal"][-1]
