"""Faults that end training on all machines until it is resumed, one after the other in a single training.

The last test checks the ledger and the weights, as in test_going_on.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..e2e.project_folder import wait_for
from .cluster import Cluster, cluster

pytestmark = pytest.mark.long  # a minute and a half


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("coming-back") / "sides", "train.timeout_seconds=60") as three:
        three.start_all()
        yield three


@pytest.fixture
def three(training: Cluster) -> Cluster:
    training.wait_until_training(processes=3)
    return training


def test_joined_machines_wait_for_a_lost_coordinator_that_resumes(three: Cluster) -> None:
    first, *others = three.machines
    first.lose()
    wait_for(lambda: all("pipe run --resume" in three.commands[machine.name].text for machine in others))
    first.boot()
    three.resume()
    three.wait_until_training(processes=3)


@pytest.mark.long
def test_full_disk_is_reported_with_its_host_and_training_resumes(three: Cluster) -> None:
    first = three.machines[0]
    folder = three.project.checkpoints
    wait_for(lambda: list(folder.glob("step-*")))
    first.do("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder))
    for command in three.commands.values():
        assert "disk full on node0" in command.ends(expect=2)
    first.do("umount", str(folder))
    three.resume()
    three.wait_until_training(processes=3)


def test_terminating_all_machines_loses_no_step(three: Cluster) -> None:
    wait_for(lambda: 3 <= three.step % 10 <= 7)  # far from the checkpoints at the ends of epochs
    made = three.step
    for machine in three.machines:
        three.terminate(machine)
    for command in three.commands.values():
        assert f"pipe run --resume {three.run.id}" in command.ends(expect=143)
    three.resume()
    three.wait_until_training(processes=3)
    assert three.began >= made, "no step was lost"


def test_every_sample_is_used_once_and_the_weights_are_identical(training: Cluster, undisturbed: bytes) -> None:
    training.finish(undisturbed)
