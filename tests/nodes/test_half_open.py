"""A link that silently drops all packets in one direction: training goes on by itself, and reports the lost time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pipeline.contract.restarts import read_attempts

from ..e2e.project_folder import wait_for
from .cluster import Cluster, cluster

pytestmark = pytest.mark.long  # two minutes


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("half-open") / "sides") as three:
        three.start_all()
        yield three


@pytest.mark.parametrize("number", [1, 2, 0])
def test_lost_seconds_begin_with_the_last_step_before_a_half_open_link(three: Cluster, number: int) -> None:
    """The others go on without the machine, except without the first one, where the machines meet."""
    three.wait_until_training(processes=3)
    before, lost = three.attempt, read_attempts(three.run.path).seconds_lost
    metrics = three.run.partial("train") / "metrics.jsonl"
    three.machines[number].host.deafen()
    last = wait_for(lambda: time.time() - (written := metrics.stat().st_mtime) > 5 and written)
    if number:
        three.wait_until_training(processes=2)
    else:
        wait_for(lambda: [event for event in three.events if (event.event, event.attempt) == ("end", before)])
        time.sleep(10)  # the fault itself
    three.machines[number].host.hear()
    three.wait_until_training(processes=3)
    log = read_attempts(three.run.path)
    first = next(one.first_step_time for one in log.attempts if one.number > before and one.first_step_time)
    assert log.seconds_lost - lost == pytest.approx(first - last, abs=3)


def test_every_sample_is_used_once_and_the_weights_are_identical(three: Cluster, undisturbed: bytes) -> None:
    three.finish(undisturbed)
