"""The number of requests in flight that the benchmark recommends for one pod."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.serve import capacity
from benchmarks.serve.load import LoadResult
from benchmarks.serve.workloads import WORKLOADS


def step(clients: int, per_second: float, p99_ms: float) -> tuple[int, LoadResult]:
    return clients, LoadResult(1000, per_second, p99_ms / 2, p99_ms, 0)


STEPS = [step(1, 100, 10), step(2, 190, 11), step(4, 300, 14), step(8, 310, 26), step(16, 312, 52), step(32, 312, 103)]


@pytest.mark.parametrize(
    ("deadline_ms", "target"),
    [
        (1000, 2),  # 4 clients get almost the throughput of 32
        (12, 1),  # 2 are answered in time
        (10, 1),
        (5, 0),
    ],
)
def test_target_keeps_the_deadline_and_a_minimum_gain(deadline_ms: float, target: int) -> None:
    assert capacity.target(STEPS, deadline_ms) == target


def test_text_ends_with_the_setting_or_the_reason_for_none() -> None:
    found = capacity.Capacity("net", 50, STEPS, 2)
    assert capacity.text([found]).splitlines()[-1] == (
        "deploy.target_concurrency=2: about 190 requests a second per pod"
    )
    assert "not even one client" in capacity.text([capacity.Capacity("net", 5, STEPS[:1], 0)])


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_measurement_ends_when_the_deadline_is_exceeded(tmp_path: Path) -> None:
    bundle = WORKLOADS["digits"].bundle(tmp_path / "bundle")
    found = capacity.measure("digits", bundle, 0.001, 1)
    assert (found.model, len(found.steps), found.target) == ("digits", 1, 0)
