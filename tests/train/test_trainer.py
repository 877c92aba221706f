from __future__ import annotations

import shutil
import time
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.contract.errors import ConfigError
from pipeline.contract.processes import Rank
from tests.train.distributed import run_distributed
from train.batch_order import BatchOrder
from train.parallel.base import Stopwatch, Strategy, Traffic
from train.process_group import ProcessGroup
from train.trainer import BatchBalance, CheckpointPauses, batch_sizes_differ, check_compiler, split_by_speed

from .conftest import Project, equal, journal, weights
from .test_trainer_more import Line, config, trainer

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
    """Of a strategy, what balancing looks at."""

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


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def test_sizes_differ_unless_batches_and_slices_divide() -> None:
    assert not batch_sizes_differ(BatchOrder(samples=64, batch_size=8, seed=0), cuts=2)
    assert batch_sizes_differ(BatchOrder(samples=64, batch_size=8, seed=0), cuts=3)
    assert batch_sizes_differ(BatchOrder(samples=65, batch_size=8, seed=0), cuts=1)
    assert batch_sizes_differ(BatchOrder(samples=60, batch_size=8, seed=0), cuts=1)  # 8 batches: 7.5 samples each


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_missing_compiler_is_reported_at_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.compile=true: no compiler \(.+\) on " + device):
        check_compiler(torch.device(device))


def test_training_without_a_compiler_stops_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="compile=false"):
        trainer(Line(), config(compile=True))


def graphs(group: ProcessGroup) -> int:
    """How many are made for batches of 5, cut in two."""
    counters.clear()
    made = trainer(Line(), config(compile=True, accumulate=2))
    assert {len(job.indices) for step in range(3) for job in made._requests(step)} == {2, 3}
    for step in range(3):
        made._step(step)
    found: int = counters["stats"]["unique_graphs"]
    return found


@needs_compiler
@pytest.mark.long
def test_batches_of_all_sizes_take_one_graph() -> None:
    """In a separate process: the compiler imports setuptools, which depends on earlier imports."""
    assert run_distributed(graphs, 1) == [1]


@pytest.mark.long
@needs_compiler
def test_compiled_training_matches_and_resumes_bit_for_bit(
    project: Project,
) -> None:
    """Batches of 7 and 8 for two processes and two micro-batches; the cut run goes on with another size first."""
    plain = project.run("plain", accumulate=2, epochs=2)
    whole, split_by_speed = (
        project.run(name, accumulate=2, epochs=2, compile=True, checkpoint_every=1) for name in "wc"
    )
    for run in (plain, whole):
        done = project.train(run, processes=2)
        assert done.returncode == 0, done.stderr
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(whole)[name], tensor, rtol=1e-4, atol=1e-5)
    shutil.copytree(whole.partial("train"), split_by_speed.partial("train"))
    for later in sorted((split_by_speed.partial("train") / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(later)
    done = project.train(split_by_speed, processes=2)
    assert "resumed from the checkpoint" in done.stdout, done.stderr
    assert equal(weights(split_by_speed), weights(whole))


def test_checkpoint_pauses_are_averaged_per_line_and_summed() -> None:
    pauses = CheckpointPauses()
    assert pauses.metrics() == {}
    for _ in range(2):
        with pauses.measured():
            time.sleep(0.02)
    received = pauses.metrics()["checkpoint_seconds"]
    assert received >= 0.02
    assert pauses.seconds == pytest.approx(2 * received)
    assert (pauses.count, pauses.metrics()) == (2, {})
