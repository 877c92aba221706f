"""Interruptions of the network that are shorter than `train.timeout_seconds`: training waits, and goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from .cluster import Cluster, cluster

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cuts") / "sides", "train.timeout_seconds=300") as three:
        three.start_all()
        yield three


@pytest.mark.parametrize(("number", "seconds"), [(1, 20), (1, 60), (1, 250), (0, 60)])
def test_a_cut_below_the_timeout_causes_no_restart(three: Cluster, number: int, seconds: int) -> None:
    """The store where the machines meet is on machine 0."""
    three.wait_until_training(processes=3)
    before = three.events
    three.machines[number].host.cut()
    time.sleep(seconds)  # the fault itself
    three.machines[number].host.restore()
    three.wait_until_training(processes=3)
    assert [event for event in three.events if event not in before and event.event in ("start", "end")] == []
