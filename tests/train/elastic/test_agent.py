"""The agent: why processes ended, and what it does then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from pipeline.contract.restarts import ProcessEnd
from pipeline.system.errors import DataError, DeviceFault, LostContact, write_error
from pipeline.system.processes import AgentStatus
from train.elastic import agent as module
from train.elastic.agent import Agent, describe_failures, devices_work
from train.elastic.meeting import Meeting, Place, Round

HOST = os.uname().nodename


def test_a_killed_process_is_the_cause_of_lost_contact(tmp_path: Path) -> None:
    write_error(LostContact("rank 0 lost contact"), tmp_path)
    assert describe_failures({0: 1, 1: -signal.SIGKILL}, tmp_path) == ProcessEnd(
        HOST, f"rank 1 on {HOST} was killed (SIGKILL)"
    )


def test_a_permanent_error_ends_training(tmp_path: Path) -> None:
    write_error(DataError("the loss is not finite"), tmp_path)
    assert describe_failures({0: 2, 1: -signal.SIGTERM}, tmp_path) == ProcessEnd(
        HOST, "the loss is not finite", passing=False
    )


def test_the_first_cause_among_several_ends_is_reported(tmp_path: Path) -> None:
    statuses = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    assert describe_failures(statuses, tmp_path) == ProcessEnd(HOST, f"rank 1 on {HOST} was killed (SIGKILL)")


def test_lost_contact_without_a_local_cause_is_reported_as_echo(tmp_path: Path) -> None:
    write_error(LostContact("rank 1 lost contact"), tmp_path)
    assert describe_failures({1: 1}, tmp_path) == ProcessEnd(HOST, "rank 1 lost contact", echo=True)


def test_terminated_processes_are_reported_when_no_other_ended(tmp_path: Path) -> None:
    assert describe_failures({0: -15, 1: -15}, tmp_path) == ProcessEnd(HOST, f"rank 0 on {HOST} was ended by SIGTERM")


def test_a_failure_without_an_error_is_permanent(tmp_path: Path) -> None:
    assert describe_failures({0: 3}, tmp_path) == ProcessEnd(
        HOST, f"rank 0 on {HOST} exited with status 3 and left no reason", passing=False
    )


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AgentStatus | None]:
    """Return a function that lets a process of a machine with two GPUs end with a status, and returns the agent's."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    write_error(DeviceFault("rank 0 on here: its GPU failed"), tmp_path / "train.partial")
    agent = Agent(tmp_path, 3, Meeting(HashStore(), "127.0.0.1", 1, 1, 1, 0))

    def fail(status: int) -> AgentStatus | None:
        agent._processes = {0: End(status)}
        return agent._watch(Round(1, 0, (Place(address="127.0.0.1", port=1, processes=1),)))

    return fail


class End:
    """A process that has ended."""

    pid = 0

    def __init__(self, status: int) -> None:
        self._status = status

    def poll(self) -> int:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        return self._status

    def send_signal(self, sig: int) -> None:
        """Do nothing: the process has ended."""


def test_mismatched_collectives_are_named_and_not_retried(tmp_path: Path) -> None:
    output = (
        "[enforce fail] op.preamble.length <= op.nbytes. 4000 vs 4. Received data size doesn't match expected size."
    )
    end = describe_failures({0: -signal.SIGABRT, 1: -signal.SIGTERM}, tmp_path, output)
    assert not end.passing
    assert end.reason.startswith(
        f"the processes call different collectives: rank 0 on {HOST} received 4000 bytes in a collective where it "
        "expected 4. To fix it: let every process call the same ones"
    )
    assert describe_failures({0: -signal.SIGKILL}, tmp_path, output).passing
    assert describe_failures({0: -signal.SIGABRT}, tmp_path, "another abort").passing


def test_a_machine_stays_if_all_its_devices_work_again(
    failing: Callable[[int], AgentStatus | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def work(count: int) -> bool:
        tried.append(count)
        return True

    monkeypatch.setattr(module, "devices_work", work)
    assert failing(DeviceFault.exit_code) is None
    assert tried == [2]


def test_a_machine_leaves_if_one_of_its_devices_does_not_work(
    failing: Callable[[int], AgentStatus | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "devices_work", lambda _count: False)
    assert failing(DeviceFault.exit_code) is AgentStatus.LOST_DEVICE


def test_a_machine_leaves_if_its_driver_lists_fewer_devices(
    failing: Callable[[int], AgentStatus | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert failing(-signal.SIGABRT) is AgentStatus.LOST_DEVICE


def test_devices_are_tested_in_another_process() -> None:
    assert devices_work(0)
    if torch.cuda.device_count() == 0:
        assert not devices_work(1)


def test_a_missing_module_is_the_reason_and_permanent(tmp_path: Path) -> None:
    output = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'einops'\n"
    end = describe_failures({0: 1}, tmp_path, output)
    assert not end.passing
    assert "the module `einops` is not installed" in end.reason
