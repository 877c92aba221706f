from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from benchmarks.faults.failures import failures, gaps
from benchmarks.faults.measure import Course, Row, percentile, text
from pipeline.contract.chaos import ChaosEvent, Kill

STEP = ChaosEvent(event="step", time=100.0, born=90.0)


def test_failure_times_depend_on_the_seed_only() -> None:
    found = list(itertools.islice(gaps(60, seed=1), 200))
    assert found == list(itertools.islice(gaps(60, seed=1), 200))
    assert found != list(itertools.islice(gaps(60, seed=2), 200))
    assert all(30 <= gap <= 90 for gap in found)
    assert 55 < sum(found) / len(found) < 65


def test_workers_fail_in_turn_while_training_makes_steps() -> None:
    due = failures(60, "worker", processes=2, seed=1)
    first, second = itertools.islice(gaps(60, seed=1), 2)
    killed, back = ChaosEvent(event="kill", time=150.0), ChaosEvent(event="step", time=158.0, born=155.0)
    assert due([], 0.0) is None
    assert due([STEP], 0.0) == (100.0 + first, Kill(place="moment", step=0, rank=0))
    assert due([STEP, killed], 0.0) is None
    assert due([STEP, killed, back], 0.0) == (150.0 + second, Kill(place="moment", step=0, rank=1))
    assert failures(0, "worker", processes=2, seed=1)([STEP], 0.0) is None


@pytest.mark.parametrize(("values", "share", "expected"), [([], 0.5, None), ([3, 1, 2], 0.5, 2), ([1, 2, 3], 0.99, 3)])
def test_percentile_is_a_measured_value(values: Sequence[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_the_table_shows_its_configuration() -> None:
    course = Course(steps=4096, processes=2, checkpoint_every=20, victim="worker", seed=0)
    row = Row(15.0, 0.7, 4096, 300.0, 20, 0, 4.0, 6.0, 1.5, 9.0)
    never = Row(0.0, 0.98, 4096, 210.0, 0, 0, None, None, None, None)
    lines = text({"course": asdict(course), "step_ms": 50.0, "rows": [asdict(never), asdict(row)]}).splitlines()
    assert lines[0] == (
        "4096 steps of 50.0 ms undisturbed, 2 processes, a checkpoint every 20 steps, kill -9 of a worker, seed 0"
    )
    assert lines[2].split() == ["never", "0.980", "0", "-", "-", "-", "-"]
    assert lines[3].split() == ["15", "s", "0.700", "20", "4.0", "s", "6.0", "s", "1.5", "ms", "9.0", "ms"]


@pytest.mark.long
def test_goodput_under_failures_is_reported() -> None:
    argv = [sys.executable, "-m", "benchmarks.faults", "--quick", "-o", "json"]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    never, often = json.loads(done.stdout)["rows"]
    assert (never["kills"], never["steps"], often["steps"]) == (0, 400, 400)
    assert often["kills"] > 0
    assert often["by_hand"] == 0
    assert often["goodput"] > 0  # above 1 where the machine became faster after the undisturbed steps
