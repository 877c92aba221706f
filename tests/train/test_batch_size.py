from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from pipeline.spec.errors import ResourceError
from train.batch_size import FILE, Choice, Timed, describe, fastest, micro_batches, sizes, still_gaining

from .conftest import Project, equal, failure, journal, weights

LOSS = "    def loss(self, outputs, batch):\n"
# The second process has no memory for more than eight samples.
POOR = """        import os
        if os.environ.get("RANK") == "1" and len(batch["x"]) > 8:
            raise torch.OutOfMemoryError("no room")
"""


def timed(*speeds: float) -> list[Timed]:
    return [Timed(8 << i, speed) for i, speed in enumerate(speeds)]


def choice(run: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.partial("train") / FILE).read_text())
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
def test_sizes_are_powers_of_two_from_two_samples_a_micro_batch_to_the_whole_split(
    samples: int, processes: int, accumulate: int, expected: list[int]
) -> None:
    assert sizes(samples, processes, accumulate) == expected


def test_the_largest_slice_and_its_largest_micro_batch_are_tried() -> None:
    assert micro_batches(64, 3, 4) == (4, 6)
    assert micro_batches(4, 4, 8) == (1, 1)


def test_the_fastest_is_taken_and_of_two_alike_the_smaller() -> None:
    assert fastest(timed(100, 200, 150)) == 16
    assert fastest(timed(100, 199, 200)) == 16
    assert fastest(timed(100)) == 8


def test_timing_ends_after_two_doublings_without_a_gain() -> None:
    assert still_gaining([])
    assert still_gaining(timed(100, 90))
    assert still_gaining(timed(100, 90, 120))
    assert not still_gaining(timed(100, 90, 101))


def test_the_choice_is_told_with_what_it_was_chosen_from() -> None:
    told = describe(Choice(16, 64, "memory", tuple(timed(1000, 2000))))
    speeds = "samples/s by size: 8: 1,000, 16: 2,000"
    assert told == f"batch size 16 ({speeds}; the largest that fits is 64, for want of memory)"


def test_trials_leave_no_trace_in_the_weights_and_a_resumed_run_does_not_choose_again(project: Project) -> None:
    """The task draws random numbers, and keeps statistics in buffers: both must be as without trials."""
    project.replace("nn.Tanh()", "nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)")
    run = project.run("auto", batch_size="auto", epochs=2)
    done = project.train(run)
    assert done.returncode == 0, done.stderr
    found = choice(run)
    assert (found["largest"], found["limit"]) == (32, "samples")
    assert f"batch size {found['batch_size']} (" in done.stdout
    assert all(line["batch_size"] == found["batch_size"] for line in journal(run) if "loss" in line)
    assert json.loads((run.partial("train") / "summary.json").read_text())["batch_size"] == found["batch_size"]

    named = project.run("named", batch_size=found["batch_size"], epochs=2)
    assert project.train(named).returncode == 0
    assert equal(weights(run), weights(named))

    other = 4 if found["batch_size"] != 4 else 8
    (run.partial("train") / FILE).write_text(json.dumps({**found, "batch_size": other}))
    shutil.rmtree(run.partial("train") / "checkpoints")
    assert project.train(run).returncode == 0
    assert journal(run)[0]["batch_size"] == other


def test_what_does_not_fit_one_process_fits_none(project: Project) -> None:
    project.replace('{"train": 37,', '{"train": 120,')
    project.replace(LOSS, LOSS + POOR)
    run = project.run(batch_size="auto", epochs=1)
    done = project.train(run, processes=2)
    assert done.returncode == 0, done.stderr
    found = choice(run)
    assert [entry["batch_size"] for entry in found["timed"]] in ([4, 8, 16], [4, 8])
    assert (found["largest"], found["limit"]) == (16, "memory")


def test_a_budget_that_holds_not_even_the_smallest_batch_is_refused_with_a_mend(project: Project) -> None:
    for narrow, wide in (("Linear(3, 8)", "Linear(3, 99999)"), ("Linear(8, 1)", "Linear(99999, 1)")):
        project.replace(narrow, wide)
    run = project.run(batch_size="auto", memory_mb=1)
    assert project.train(run).returncode != 0
    assert isinstance(failure(run), ResourceError)
    assert "a batch of 2 does not fit 1 MiB a process; raise train.memory_mb" in str(failure(run))
