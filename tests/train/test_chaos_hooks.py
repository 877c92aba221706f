from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from pipeline.contract.processes import Rank
from train.chaos_hooks import ChaosEvent, ChaosHook, ChaosLog, Kill
from train.process_group import ProcessGroup


class Dead(BaseException):
    """Where a process would have ended."""


class Process:
    """One life of a training process of two, which steps on when it is told to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.group = ProcessGroup(Rank(rank, world_size=2), torch.device("cpu"))
        self.trap = ChaosHook(folder, self.group, kill=_die)

    def step(self, step: int) -> None:
        self.group.heartbeat.at(step - 1, "update")
        self.trap("step")


def _die() -> None:
    raise Dead


def planned(folder: Path, *kills: Kill) -> ChaosLog:
    record = ChaosLog(folder)
    record.write_schedule(kills)
    return record


def made(record: ChaosLog) -> list[tuple[int, int, int]]:
    return [(event.number, event.rank, event.step) for event in record.events() if event.event == "kill"]


def test_the_chosen_process_dies_at_the_step_that_is_due_and_no_other(tmp_path: Path) -> None:
    record = planned(tmp_path, Kill(place="step", step=3, rank=1))
    first, second = Process(tmp_path, 0), Process(tmp_path, 1)
    for step in (1, 2):
        first.step(step)
        second.step(step)
    first.step(3)
    with pytest.raises(Dead):
        second.step(3)
    assert made(record) == [(0, 1, 3)]


def test_one_life_meets_one_kill_and_the_next_life_the_next(tmp_path: Path) -> None:
    record = planned(tmp_path, Kill(place="step", step=1), Kill(place="write", step=1))
    life = Process(tmp_path, 0)
    with pytest.raises(Dead):
        life.step(1)
    life.trap("write")  # what dies slowly does not take the next kill with it
    life = Process(tmp_path, 0)
    life.step(2)
    with pytest.raises(Dead):
        life.trap("write")
    life = Process(tmp_path, 0)
    life.step(2)
    life.trap("write")
    assert made(record) == [(0, 0, 1), (1, 0, 2)]


def test_no_place_is_due_before_a_life_has_made_a_step(tmp_path: Path) -> None:
    """Else training could be killed for ever without getting on."""
    record = planned(tmp_path, Kill(place="renamed", step=0))
    life = Process(tmp_path, 0)
    life.trap("renamed")
    assert made(record) == []


def test_a_place_that_the_chosen_process_never_comes_to_kills_another_on_its_second_visit(tmp_path: Path) -> None:
    record = planned(tmp_path, Kill(place="ledger", step=1, rank=1))
    first = Process(tmp_path, 0)
    first.step(1)
    first.trap("ledger")
    with pytest.raises(Dead):
        first.trap("ledger")
    assert made(record) == [(0, 0, 1)]


def test_training_waits_at_its_limit_for_a_kill_from_outside(tmp_path: Path) -> None:
    record = planned(tmp_path, Kill(place="moment", who="launcher", step=1, hold=2))
    life = Process(tmp_path, 0)
    life.step(1)
    assert [event.event for event in record.events()] == ["born", "step", "ready"]
    further = threading.Thread(target=life.step, args=(2,), daemon=True)
    further.start()
    further.join(0.1)
    assert further.is_alive()
    assert record.claim(0)
    further.join(10)
    assert not further.is_alive()


def test_a_kill_is_claimed_once(tmp_path: Path) -> None:
    record = planned(tmp_path, Kill(place="step", step=1))
    assert (record.next_kill(), record.claim(0), record.claim(0), record.next_kill()) == (0, True, False, 1)


def test_the_record_keeps_what_it_was_reported_in_order(tmp_path: Path) -> None:
    record = planned(tmp_path)
    told = [ChaosEvent(event="born", time=time.time(), rank=rank) for rank in range(3)]
    for event in told:
        record.append(event)
    assert record.events() == told
