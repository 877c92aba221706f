"""Training on three machines goes on if a process is stopped for a while (SIGSTOP), with or without it.

The last test checks that every sample was used once an epoch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from .cluster import Cluster, cluster

pytestmark = pytest.mark.long  # ten minutes

WORKER, AGENT, COMMAND = "train", "train.elastic.agent", "pipeline"
NODE, STORE = "pipeline.training.node", "train.elastic.store"  # only on the first machine
SERVER = "pipeline.system.fork_server"
CASES = [
    *((module, machine, seconds) for module in (WORKER, AGENT, COMMAND) for machine, seconds in enumerate((5, 30, 90))),
    (WORKER, 0, 30), (WORKER, 2, 5), (AGENT, 0, 30), (COMMAND, 0, 90),
    (NODE, 0, 30), (STORE, 0, 30), (SERVER, 1, 30),
]  # fmt: skip


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("pauses") / "sides", "train.epochs=400") as three:
        three.start_all()
        yield three


@pytest.mark.parametrize(("module", "number", "seconds"), CASES)
def test_training_outlives_a_stopped_process(training: Cluster, module: str, number: int, seconds: int) -> None:
    training.wait_until_training(processes=3)
    (process,) = (
        process for process in training.machines[number].processes("-m", module) if process.cmdline()[2] == module
    )
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)  # the fault itself
    if process.is_running():
        process.send_signal(signal.SIGCONT)
    for command in training.commands.values():  # nsenter stops with its command, but does not continue with it
        command.process.send_signal(signal.SIGCONT)
    training.wait_until_training(processes=3)
    assert {command.process.poll() for command in training.commands.values()} == {None}


def test_every_sample_is_used_once(training: Cluster) -> None:
    training.pace(0)
    for command in training.commands.values():
        command.ends()
    assert "exactly once in each" in training.project.pipe("verify", training.run.id).stdout
