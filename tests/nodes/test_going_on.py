"""Faults that training on three machines outlives by itself: one training meets them all, one after the other.

The clock of one machine is an hour ahead all the time. The last test checks the result: every sample once an epoch,
and the weights of a training without faults, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ..e2e.project_folder import wait_for
from .clock import shifted
from .cluster import Cluster, cluster

# Quick tests have its parts: tests/train/test_ledger.py one killed process, test_node.py the decisions.
pytestmark = pytest.mark.long

AGENT, WORKER = ("train.elastic.agent",), ("-m", "train")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("going-on")
    with cluster(folder / "sides") as three:
        three.environments["node1"] = shifted(folder / "clock", seconds=3600)
        three.start_all()
        yield three


@pytest.fixture
def three(training: Cluster) -> Cluster:
    """All three machines train, whatever the test before did."""
    training.wait_until_training(processes=3)
    return training


def test_a_killed_worker_starts_again_with_all_the_others(three: Cluster) -> None:
    before, pid = three.attempt, three.machines[1].processes(*WORKER)[0].pid
    three.machines[1].processes(*WORKER)[0].kill()
    wait_for(lambda: three.attempt > before)
    three.wait_until_training(processes=3)
    assert "rank 1 on node1 was killed (SIGKILL)" in {event.reason for event in three.events}
    assert pid not in [process.pid for process in three.machines[1].processes(*WORKER)]


def test_a_lost_machine_is_dropped_and_joins_again_when_it_is_back(three: Cluster) -> None:
    lost = three.machines[2]
    lost.lose()
    three.wait_until_training(processes=2)
    lost.boot()
    three.join(lost)
    three.wait_until_training(processes=3)


def test_a_killed_agent_takes_its_worker_along_and_is_started_again(three: Cluster) -> None:
    machine, before = three.machines[1], three.attempt
    worker = machine.processes(*WORKER)[0]
    machine.processes(*AGENT)[0].kill()
    wait_for(lambda: not worker.is_running())
    wait_for(lambda: three.attempt > before)
    three.wait_until_training(processes=3)


def test_a_killed_command_takes_everything_on_its_machine_along(three: Cluster) -> None:
    machine = three.machines[2]
    machine.processes("-m")[0].kill()
    wait_for(lambda: machine.processes("-m") == [])
    three.wait_until_training(processes=2)
    three.join(machine)
    three.wait_until_training(processes=3)


def test_a_link_that_is_cut_for_a_moment_is_waited_for(three: Cluster) -> None:
    before = three.events
    three.machines[1].host.cut()
    time.sleep(3)  # the fault itself: well below train.timeout_seconds
    three.machines[1].host.restore()
    three.wait_until_training(processes=3)
    assert [event for event in three.events if event not in before and event.event in ("start", "end")] == []


def test_a_slow_link_is_no_fault(three: Cluster) -> None:
    before = three.events
    three.machines[2].host.slow(megabits=0.2)
    three.wait_until_training(processes=3, steps=10)
    three.machines[2].host.fast()
    assert [event for event in three.events if event not in before and event.event in ("start", "end")] == []


def test_a_machine_that_is_requested_to_end_makes_a_checkpoint_first_and_the_others_go_on_from_there(
    three: Cluster,
) -> None:
    machine = three.machines[2]
    wait_for(lambda: 3 <= three.step % 10 <= 7)  # far from the checkpoints at the ends of epochs
    made = three.step
    three.terminate(machine)
    assert f"`pipe join {three.run.id}` joins again" in three.commands[machine.name].ends(expect=143)
    three.wait_until_training(processes=2)
    assert three.began >= made, "no step was lost"
    three.join(machine)
    three.wait_until_training(processes=3)


def test_a_machine_behind_a_cut_link_is_dropped_and_comes_back_with_the_link(three: Cluster) -> None:
    machine = three.machines[1]
    machine.host.cut()
    three.wait_until_training(processes=2)
    machine.host.restore()
    three.wait_until_training(processes=3)


def test_after_all_of_that_every_sample_was_used_once_and_the_weights_are_the_same_bits(
    training: Cluster, undisturbed: bytes
) -> None:
    training.wait_until_training(processes=3)
    training.finish(undisturbed)
    hosts = {event.hosts for event in training.events if event.event == "start"}
    assert ("node0", "node1", "node2") in hosts
