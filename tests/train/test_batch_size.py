from __future__ import annotations

import json
import shutil
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ResourceError
from pipeline.system.processes import Rank
from train.batch_size import (
    BATCH_SIZE_FILE,
    BatchSizeChoice,
    StepProbe,
    Timing,
    budget_bytes,
    candidate_sizes,
    describe_choice,
    fastest,
    find_batch_size,
    is_still_gaining,
    micro_batches,
)
from train.device.memory import free_bytes
from train.process_group import ProcessGroup

from .conftest import Project, equal, failure, journal, weights
from .device.test_memory import ConvNet, Perceptron, peak_bytes
from .distributed import run_distributed


def timed(*speeds: float) -> list[Timing]:
    return [Timing(8 << i, speed) for i, speed in enumerate(speeds)]


def choice(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.partial("train") / BATCH_SIZE_FILE).read_text())
    return found


@pytest.mark.parametrize(
    ("samples", "processes", "accumulate", "expected"),
    [
        (37, 1, 1, [2, 4, 8, 16, 32]),
        (64, 2, 1, [4, 8, 16, 32, 64]),
        (100, 3, 2, [16, 32, 64]),
        (5, 3, 1, [5]),
        (20, 2, 100, [20]),
    ],
)
def test_candidate_sizes_are_powers_of_two_up_to_the_split(
    samples: int, processes: int, accumulate: int, expected: list[int]
) -> None:
    assert candidate_sizes(samples, processes, accumulate) == expected


def test_largest_micro_batch_of_largest_slice_is_measured() -> None:
    assert micro_batches(64, 3, 4) == (4, 6)
    assert micro_batches(4, 4, 8) == (1, 1)


def test_fastest_batch_size_wins_and_the_smaller_of_two_equals() -> None:
    assert fastest(timed(100, 200, 150)) == 16
    assert fastest(timed(100, 199, 200)) == 16
    assert fastest(timed(100)) == 8


def test_timing_ends_after_two_doublings_without_a_gain() -> None:
    assert is_still_gaining([])
    assert is_still_gaining(timed(100, 90))
    assert is_still_gaining(timed(100, 90, 120))
    assert not is_still_gaining(timed(100, 90, 101))


def test_chosen_batch_size_is_printed_with_the_alternatives() -> None:
    received = describe_choice(BatchSizeChoice(16, "memory", tuple(timed(1000, 2000))))
    speeds = "samples/s by size: 8: 1,000, 16: 2,000"
    assert received == f"batch size 16 ({speeds}; limited by memory)"


def test_measuring_leaves_weights_unchanged_and_resume_keeps_the_choice(project: Project) -> None:
    """The task draws random numbers, and keeps statistics in buffers: both must be as without trials."""
    project.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)")
    run = project.run("auto", batch_size="auto", epochs=2)
    done = project.train(run)
    assert done.returncode == 0, done.stderr
    found = choice(run)
    assert found["limit"] in ("samples", "speed")
    assert f"batch size {found['batch_size']} (" in done.stdout
    assert all(line["batch_size"] == found["batch_size"] for line in journal(run) if "loss" in line)
    assert json.loads((run.partial("train") / "summary.json").read_text())["batch_size"] == found["batch_size"]

    named = project.run("named", batch_size=found["batch_size"], epochs=2)
    assert project.train(named).returncode == 0
    assert equal(weights(run), weights(named))

    other = 4 if found["batch_size"] != 4 else 8
    (run.partial("train") / BATCH_SIZE_FILE).write_text(json.dumps({**found, "batch_size": other}))
    shutil.rmtree(run.partial("train") / "checkpoints")
    assert project.train(run).returncode == 0
    assert journal(run)[0]["batch_size"] == other


def test_too_little_memory_for_any_batch_is_an_error(project: Project) -> None:
    for narrow, wide in (("Linear(3, 8)", "Linear(3, 99999)"), ("Linear(8, 1)", "Linear(99999, 1)")):
        project.replace(narrow, wide)
    project.replace(
        "class Tiny:", "import train.batch_size\ntrain.batch_size.budget_bytes = lambda group: 1 << 20\n\n\nclass Tiny:"
    )
    run = project.run(batch_size="auto")
    assert project.train(run).returncode != 0
    assert isinstance(failure(run), ResourceError)
    assert "a batch of 2 does not fit 1 MiB per process; to fix it, raise train.accumulate" in str(failure(run))


CPU = torch.device("cpu")
ALONE = ProcessGroup(Rank(), CPU)


def test_budget_is_a_share_of_the_free_memory() -> None:
    assert 0 < budget_bytes(ALONE) < 1.2 * free_bytes()


class Wide:
    inputs = ("x",)
    outputs = ("y",)
    poison: Exception | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))

    def data(self, split: str) -> dict[str, Any]:
        return {"x": np.ones((64, 256), np.float32)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.poison is not None:
            raise self.poison
        return outputs.square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def trial(task: Any, group: ProcessGroup = ALONE, **train: Any) -> StepProbe:
    return StepProbe(task, Train(**train), Samples("train", task.data("train")), group)


@pytest.mark.parametrize("task", [Perceptron(), ConvNet()])
def test_peak_is_what_the_profiler_measures(task: Any) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        probe = trial(task)
        probe.seconds(64, passes=1)
    assert trial(task).peak_bytes(64, passes=1) == pytest.approx(peak_bytes(profiler), rel=0.03)


class ReadingValues(Wide):
    """A task that no trace without values can follow."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs[batch["x"][:, :1] > 0].square().mean() * float(batch["x"].mean())


def test_bound_is_at_least_what_a_step_of_double_the_size_needs() -> None:
    for task in (Wide(), Perceptron(), ReadingValues()):
        probe = trial(task)
        assert probe.bound(8) == 0
        peaks = {}
        for size in (8, 16, 32, 64):
            bound = probe.bound(size)
            peaks[size] = probe.peak_bytes(size, passes=1)
            assert size == 8 or peaks[size] <= bound <= 2 * peaks[size // 2]
        assert peaks[64] > peaks[8]


def test_size_whose_bound_does_not_fit_is_not_tried() -> None:
    task = Wide()
    probe = trial(task)
    assert probe.fits(8, 1, budget=1 << 40)
    task.poison = RuntimeError("a step was made")
    assert not probe.fits(16, 1, budget=probe.bound(16) - 1)


def choose(group: ProcessGroup) -> BatchSizeChoice:
    """Choose where the second process has room for micro-batches of eight samples, and the first for any."""
    task: Any = Wide()
    probe = trial(task, group)
    probe.peak_bytes(4, 1)
    limit = probe.bound(8) if group.rank.rank == 1 else 1 << 40
    with patch("train.batch_size.budget_bytes", lambda _: limit):
        return find_batch_size(task, Train(batch_size="auto"), group, Samples("train", task.data("train")))


def test_processes_with_different_memory_choose_the_same_batch_size() -> None:
    first, second = run_distributed(choose, 2)
    assert first == second
    assert [timing.batch_size for timing in first.timed] == [4, 8, 16]


def test_sgd_needs_less_memory_than_adamw() -> None:
    assert trial(Wide(), optimizer="sgd").peak_bytes(2, 1) < trial(Wide(), optimizer="adamw").peak_bytes(2, 1)


def test_gradients_of_earlier_passes_and_of_buckets_need_memory() -> None:
    weights = sum(parameter.nbytes for parameter in Wide().model().parameters())
    alone, first_pass = (trial(Wide(), optimizer="sgd").peak_bytes(2, passes) for passes in (2, 1))
    probe = trial(Wide(), ProcessGroup(Rank(world_size=2), CPU), optimizer="sgd")
    assert alone >= first_pass + weights / 2
    assert probe.peak_bytes(2, 1) == pytest.approx(alone, rel=0.05)


def test_probe_uses_the_model_that_will_be_trained() -> None:
    """A model with pretrained weights is not built by the task's model()."""
    task, model = Wide(), nn.Linear(256, 3)
    samples = Samples("train", task.data("train"))
    assert StepProbe(task, Train(), samples, ALONE, lambda: model).model is model  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_out_of_memory_means_the_size_does_not_fit(error: Exception) -> None:
    task = Wide()
    made = trial(task)
    task.poison = error
    assert made.seconds(8, passes=1) is None
    assert not made.fits(8, 1, budget=1 << 40)


def test_other_errors_of_the_task_are_raised() -> None:
    task = Wide()
    made = trial(task)
    task.poison = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1"):
        made.fits(8, 1, budget=1 << 40)
