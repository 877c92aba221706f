"""Faults from which training on three machines recovers by itself, one after the other in a single training.

The clock of one machine is an hour ahead all the time. The last test checks the ledger, and that the weights equal
those of a training without faults bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ..e2e.project_folder import wait_for
from .clock import shifted
from .cluster import Cluster, cluster

# Fast tests cover parts of this: tests/train/test_ledger.py a killed process, test_node.py the decisions.
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
    """The cluster once all three machines train, whatever the previous test did."""
    training.wait_until_training(processes=3)
    return training


def test_killed_worker_restarts_training_on_all_machines(three: Cluster) -> None:
    before, pid = three.attempt, three.machines[1].processes(*WORKER)[0].pid
    three.machines[1].processes(*WORKER)[0].kill()
    wait_for(lambda: three.attempt > before)
    three.wait_until_training(processes=3)
    assert "rank 1 on node1 was killed (SIGKILL)" in {event.reason for event in three.events}
    assert pid not in [process.pid for process in three.machines[1].processes(*WORKER)]


def test_lost_machine_is_dropped_and_rejoins_after_booting(three: Cluster) -> None:
    lost = three.machines[2]
    lost.lose()
    three.wait_until_training(processes=2)
    lost.boot()
    three.join(lost)
    three.wait_until_training(processes=3)


def test_killed_agent_ends_its_worker_and_is_restarted(three: Cluster) -> None:
    machine, before = three.machines[1], three.attempt
    worker = machine.processes(*WORKER)[0]
    machine.processes(*AGENT)[0].kill()
    wait_for(lambda: not worker.is_running())
    wait_for(lambda: three.attempt > before)
    three.wait_until_training(processes=3)


def test_killed_command_ends_everything_on_its_machine(three: Cluster) -> None:
    machine = three.machines[2]
    machine.processes("-m")[0].kill()
    wait_for(lambda: machine.processes("-m") == [])
    three.wait_until_training(processes=2)
    three.join(machine)
    three.wait_until_training(processes=3)


def test_short_network_outage_causes_no_restart(three: Cluster) -> None:
    before = three.events
    three.machines[1].host.cut()
    time.sleep(3)  # the fault itself: well below train.timeout_seconds
    three.machines[1].host.restore()
    three.wait_until_training(processes=3)
    assert [event for event in three.events if event not in before and event.event in ("start", "end")] == []


def test_slow_network_causes_no_restart(three: Cluster) -> None:
    before = three.events
    three.machines[2].host.slow(megabits=0.2)
    three.wait_until_training(processes=3, steps=10)
    three.machines[2].host.fast()
    assert [event for event in three.events if event not in before and event.event in ("start", "end")] == []


def test_terminated_machine_saves_a_checkpoint_and_others_continue(three: Cluster) -> None:
    machine = three.machines[2]
    wait_for(lambda: 3 <= three.step % 10 <= 7)  # far from the checkpoints at the ends of epochs
    made = three.step
    three.terminate(machine)
    assert f"`pipe join {three.run.id}` joins again" in three.commands[machine.name].ends(expect=143)
    three.wait_until_training(processes=2)
    assert three.began >= made, "no step was lost"
    three.join(machine)
    three.wait_until_training(processes=3)


def test_disconnected_machine_is_dropped_and_rejoins(three: Cluster) -> None:
    machine = three.machines[1]
    machine.host.cut()
    three.wait_until_training(processes=2)
    machine.host.restore()
    three.wait_until_training(processes=3)


def test_every_sample_is_used_once_and_the_weights_are_identical(training: Cluster, undisturbed: bytes) -> None:
    training.wait_until_training(processes=3)
    training.finish(undisturbed)
    hosts = {event.hosts for event in training.events if event.event == "start"}
    assert ("node0", "node1", "node2") in hosts
