"""The elastic agent: why processes ended, and heartbeats of two machines whose clocks are an hour apart."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from pipeline.contract.restarts import ProcessEnd
from pipeline.system.errors import DataError, DeviceFault, LostContact, Stalled, write_error
from train.elastic import agent as module
from train.elastic.agent import Agent, LocalClockBackend, describe_failures, devices_work

HOST = os.uname().nodename


def test_a_killed_process_is_the_cause_of_lost_contact(tmp_path: Path) -> None:
    write_error(LostContact("rank 0 lost contact"), tmp_path)
    assert describe_failures({0: 1, 1: -signal.SIGKILL}, tmp_path) == ProcessEnd(
        HOST, f"rank 1 on {HOST} was killed (SIGKILL)"
    )


def test_a_hung_process_killed_by_the_watchdog_is_reported_as_hung(tmp_path: Path) -> None:
    write_error(Stalled("rank 1 does not answer: it is stopped (SIGSTOP)"), tmp_path)
    end = describe_failures({0: 1, 1: -signal.SIGKILL}, tmp_path)
    assert end == ProcessEnd(HOST, "rank 1 does not answer: it is stopped (SIGSTOP)")


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
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Agent]:
    """Return a function that lets the processes of an agent with two GPUs fail with a status."""

    def fail(status: int) -> Agent:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        spec: Any = SimpleNamespace(max_restarts=9, local_world_size=1, role="train", rdzv_handler=None)
        write_error(DeviceFault("rank 0 on here: its GPU failed"), tmp_path / "train.partial")
        agent = Agent(spec, tmp_path, 3)
        agent._processes = {0: End(status)}
        return agent

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
    failing: Callable[[int], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = failing(DeviceFault.exit_code)
    tried: list[int] = []

    def work(count: int) -> bool:
        tried.append(count)
        return True

    monkeypatch.setattr(module, "devices_work", work)
    group: Any = SimpleNamespace(workers=[Worker(local_rank=0, global_rank=0)])
    agent._monitor_workers(group)
    assert (agent.lost_device, agent._remaining_restarts, tried) == (False, 9, [2])


def test_a_machine_leaves_if_one_of_its_devices_does_not_work(
    failing: Callable[[int], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = failing(DeviceFault.exit_code)
    monkeypatch.setattr(module, "devices_work", lambda _count: False)
    group: Any = SimpleNamespace(workers=[Worker(local_rank=0, global_rank=0)])
    agent._monitor_workers(group)
    assert (agent.lost_device, agent._remaining_restarts) == (True, 0)


def test_a_machine_leaves_if_its_driver_lists_fewer_devices(
    failing: Callable[[int], Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = failing(-signal.SIGABRT)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    group: Any = SimpleNamespace(workers=[Worker(local_rank=0, global_rank=0)])
    agent._monitor_workers(group)
    assert (agent.lost_device, agent._remaining_restarts) == (True, 0)


def test_devices_are_tested_in_another_process() -> None:
    assert devices_work(0)
    if torch.cuda.device_count() == 0:
        assert not devices_work(1)


HOUR = timedelta(hours=1)


@pytest.fixture
def backend() -> C10dRendezvousBackend:
    return C10dRendezvousBackend(HashStore(), "meeting")


def state(**beats: datetime) -> bytes:
    return pickle.dumps(SimpleNamespace(last_heartbeats=beats, deadline=None))


def read_state(backend: Any) -> Any:
    return pickle.loads(backend.get_state()[0])


def test_heartbeats_are_timed_by_the_readers_clock(backend: C10dRendezvousBackend) -> None:
    reader, before = LocalClockBackend(backend, 2), datetime.now(UTC)
    for offset in (-HOUR, HOUR):
        backend.set_state(state(there=before + offset), (backend.get_state() or (b"", None))[1])
        first = read_state(reader).last_heartbeats["there"]
        assert before <= first <= datetime.now(UTC)
        assert read_state(reader).last_heartbeats["there"] == first, "the same heartbeat does not get newer"
        before = datetime.now(UTC)


def test_unchanged_heartbeats_are_written_back_as_they_were(backend: C10dRendezvousBackend) -> None:
    reader, there = LocalClockBackend(backend, 2), datetime.now(UTC) - HOUR
    backend.set_state(state(there=there))
    seen = read_state(reader)
    here = datetime.now(UTC)
    seen.last_heartbeats["here"] = here
    token = (reader.get_state() or (b"", None))[1]
    after = reader.set_state(pickle.dumps(seen), token)
    assert after is not None and after[2], "the reader's own heartbeat is written"
    assert read_state(backend).last_heartbeats == {"there": there, "here": here}
    assert pickle.loads(after[0]).last_heartbeats == seen.last_heartbeats


def test_a_conflicting_write_returns_the_newer_state(backend: C10dRendezvousBackend) -> None:
    reader = LocalClockBackend(backend, 2)
    assert reader.get_state() is None
    reader.set_state(state(here=datetime.now(UTC)))
    old = (reader.get_state() or (b"", None))[1]
    backend.set_state(state(there=datetime.now(UTC) + HOUR), old)
    answer = reader.set_state(state(here=datetime.now(UTC)), old)
    assert answer is not None and not answer[2]
    assert list(pickle.loads(answer[0]).last_heartbeats) == ["there"]


def test_last_call_timeout_starts_when_the_reader_sees_it(backend: C10dRendezvousBackend) -> None:
    reader, before = LocalClockBackend(backend, 2), datetime.now(UTC)
    backend.set_state(pickle.dumps(SimpleNamespace(last_heartbeats={}, deadline=before - HOUR)))
    assert before + timedelta(seconds=2) <= read_state(reader).deadline <= datetime.now(UTC) + timedelta(seconds=2)


def test_a_missing_module_is_the_reason_and_permanent(tmp_path: Path) -> None:
    output = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'einops'\n"
    end = describe_failures({0: 1}, tmp_path, output)
    assert not end.passing
    assert "the module `einops` is not installed" in end.reason
