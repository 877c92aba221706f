from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from pipeline.contract.chaos import ChaosEvent, ChaosLog, Kill
from pipeline.system.processes import Rank
from train.chaos_hooks import ChaosHook, drop_received_data
from train.process_group import ProcessGroup


class Dead(BaseException):
    """Raised where a process would be killed."""


class Process:
    """One of two training processes, which makes steps when the test calls `step`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.group = ProcessGroup(Rank(rank, world_size=2), torch.device("cpu"))
        self.hook = ChaosHook(folder, self.group, kill=_die)

    def step(self, step: int) -> None:
        self.group.heartbeat.at(step - 1, "update")
        self.hook("step")


class Connection(NamedTuple):
    fd: int
    status: str
    pid: int


def _die() -> None:
    raise Dead


def planned(folder: Path, *kills: Kill) -> ChaosLog:
    log = ChaosLog(folder)
    log.write_schedule(kills)
    return log


def made(log: ChaosLog) -> list[tuple[int, int, int]]:
    return [(event.number, event.rank, event.step) for event in log.events() if event.event == "kill"]


def test_only_the_chosen_rank_is_killed_at_the_due_step(tmp_path: Path) -> None:
    log = planned(tmp_path, Kill(place="step", step=3, rank=1))
    first, second = Process(tmp_path, 0), Process(tmp_path, 1)
    for step in (1, 2):
        first.step(step)
        second.step(step)
    first.step(3)
    with pytest.raises(Dead):
        second.step(3)
    assert made(log) == [(0, 1, 3)]


def test_process_that_survives_a_fault_takes_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1000.0)  # a stopped clock, restored at the end
    monkeypatch.setattr(time, "time_ns", lambda: 1000 * 10**9)
    clock = Kill(place="step", step=1, rank=0, fault="clock", seconds=3600)
    log = planned(tmp_path, clock, Kill(place="write", step=2, rank=1, fault="disk"), Kill(place="step", step=3))
    first, second = Process(tmp_path, 0), Process(tmp_path, 1)
    first.step(1)
    assert (time.time(), time.time_ns()) == (4600.0, 4600 * 10**9)
    second.step(1)
    for process in (first, second):
        process.step(2)
    first.hook("write")
    with pytest.raises(OSError, match="No space left"):
        second.hook("write")
    first.step(3)  # a full disk ends training: other processes take no further part
    assert made(log) == [(0, 0, 1), (1, 1, 2)]
    assert [(event.number, event.rank, event.step) for event in log.events() if event.event == "recovered"] == [
        (0, 0, 2)
    ]
    assert all(event.time > 4600 for event in log.events()), "the log keeps the clock of the machine"
    with pytest.raises(Dead):
        Process(tmp_path, 0).step(3)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a minimum TTL")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_half_open_connection_hides_that_data_is_dropped(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as deaf,
        server.accept()[0] as other,
    ):
        connection = Connection(deaf.fileno(), psutil.CONN_ESTABLISHED, os.getpid())  # one of several
        monkeypatch.setattr(psutil, "net_connections", lambda *_: [connection])
        drop_received_data()
        deaf.sendall(b"heard")
        assert other.recv(5) == b"heard"
        other.sendall(b"never heard")  # without an error
        deaf.settimeout(0.5)
        with pytest.raises(TimeoutError):
            deaf.recv(1)


def test_half_open_process_goes_on_only_after_more_steps_than_buffers_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_connections", lambda *_: [])
    log = planned(tmp_path, Kill(place="step", step=1, rank=1, fault="half-open"), Kill(place="step", step=1))
    first, second = Process(tmp_path, 0), Process(tmp_path, 1)
    second.step(1)
    for step in (1, 2):
        first.step(step)  # the second one's data still came
    assert made(log) == [(0, 1, 1)]
    first.step(3)
    with pytest.raises(Dead):
        first.step(4)


def test_each_process_takes_at_most_one_kill(tmp_path: Path) -> None:
    log = planned(tmp_path, Kill(place="step", step=1), Kill(place="write", step=1))
    process = Process(tmp_path, 0)
    with pytest.raises(Dead):
        process.step(1)
    process.hook("write")  # a process that ends slowly does not take the next kill
    process = Process(tmp_path, 0)
    process.step(2)
    with pytest.raises(Dead):
        process.hook("write")
    process = Process(tmp_path, 0)
    process.step(2)
    process.hook("write")
    assert made(log) == [(0, 0, 1), (1, 0, 2)]


def test_no_kill_before_the_first_step_of_a_process(tmp_path: Path) -> None:
    """Otherwise training could be killed forever without progress."""
    log = planned(tmp_path, Kill(place="renamed", step=0))
    process = Process(tmp_path, 0)
    process.hook("renamed")
    assert made(log) == []


def test_another_process_is_killed_if_the_chosen_one_skips_the_point(tmp_path: Path) -> None:
    log = planned(tmp_path, Kill(place="ledger", step=1, rank=1))
    first = Process(tmp_path, 0)
    first.step(1)
    first.hook("ledger")
    with pytest.raises(Dead):
        first.hook("ledger")
    assert made(log) == [(0, 0, 1)]


def test_training_waits_at_its_limit_for_a_kill_from_outside(tmp_path: Path) -> None:
    log = planned(tmp_path, Kill(place="moment", who="launcher", step=1, hold=2))
    process = Process(tmp_path, 0)
    process.step(1)
    assert [event.event for event in log.events()] == ["born", "step", "ready"]
    further = threading.Thread(target=process.step, args=(2,), daemon=True)
    further.start()
    further.join(0.1)
    assert further.is_alive()
    assert log.claim(0)
    further.join(10)
    assert not further.is_alive()


def test_a_kill_is_claimed_once(tmp_path: Path) -> None:
    log = planned(tmp_path, Kill(place="step", step=1))
    assert (log.next_kill(), log.claim(0), log.claim(0), log.next_kill()) == (0, True, False, 1)


def test_chaos_log_keeps_the_order_of_events(tmp_path: Path) -> None:
    log = planned(tmp_path)
    received = [ChaosEvent(event="born", time=time.time(), rank=rank) for rank in range(3)]
    for event in received:
        log.append(event)
    assert log.events() == received
