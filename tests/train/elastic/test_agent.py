"""Two machines whose clocks are an hour apart, on one store."""

from __future__ import annotations

import os
import pickle
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from pipeline.contract.errors import DataError, LostContact, Stalled, write_error
from train.elastic.agent import OwnClock, described

HOST = os.uname().nodename


def test_a_process_that_was_killed_is_why_the_others_lost_contact(tmp_path: Path) -> None:
    write_error(LostContact("rank 0 lost contact"), tmp_path)
    assert described({0: 1, 1: -signal.SIGKILL}, tmp_path) == {"reason": f"rank 1 on {HOST} was killed (SIGKILL)"}


def test_a_process_that_was_killed_because_it_did_not_answer_is_told_as_such(tmp_path: Path) -> None:
    write_error(Stalled("rank 1 does not answer: it is stopped (SIGSTOP)"), tmp_path)
    told = described({0: 1, 1: -signal.SIGKILL}, tmp_path)
    assert told == {"reason": "rank 1 does not answer: it is stopped (SIGSTOP)"}


def test_an_error_that_would_come_again_ends_training(tmp_path: Path) -> None:
    write_error(DataError("the loss is not finite"), tmp_path)
    assert described({0: 2, 1: -signal.SIGTERM}, tmp_path) == {"reason": "the loss is not finite", "passing": False}


def test_of_several_that_ended_the_one_is_told_that_others_fell_with(tmp_path: Path) -> None:
    statuses = {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: -signal.SIGABRT}
    assert described(statuses, tmp_path) == {"reason": f"rank 1 on {HOST} was killed (SIGKILL)"}


def test_lost_contact_without_a_cause_here_is_an_echo_of_one_elsewhere(tmp_path: Path) -> None:
    write_error(LostContact("rank 1 lost contact"), tmp_path)
    assert described({1: 1}, tmp_path) == {"reason": "rank 1 lost contact", "echo": True}


def test_processes_that_were_asked_to_go_are_told_where_nobody_else_ended(tmp_path: Path) -> None:
    assert described({0: -15, 1: -15}, tmp_path) == {"reason": f"rank 0 on {HOST} was ended by SIGTERM"}


def test_a_process_that_ends_without_a_word_would_do_so_again(tmp_path: Path) -> None:
    found = described({0: 3}, tmp_path)
    assert found == {"reason": f"rank 0 on {HOST} exited with status 3 and left no reason", "passing": False}


HOUR = timedelta(hours=1)


@pytest.fixture
def backend() -> C10dRendezvousBackend:
    return C10dRendezvousBackend(HashStore(), "meeting")


def state(**beats: datetime) -> bytes:
    return pickle.dumps(SimpleNamespace(last_heartbeats=beats, deadline=None))


def found(backend: Any) -> Any:
    return pickle.loads(backend.get_state()[0])


def test_a_sign_of_life_is_as_old_as_the_reader_has_known_it_whatever_the_writers_clock_says(
    backend: C10dRendezvousBackend,
) -> None:
    reader, before = OwnClock(backend, 2), datetime.now(UTC)
    for offset in (-HOUR, HOUR):
        backend.set_state(state(there=before + offset), (backend.get_state() or (b"", None))[1])
        first = found(reader).last_heartbeats["there"]
        assert before <= first <= datetime.now(UTC)
        assert found(reader).last_heartbeats["there"] == first, "the same sign does not grow younger"
        before = datetime.now(UTC)


def test_what_a_reader_does_not_change_goes_back_as_it_was_written(backend: C10dRendezvousBackend) -> None:
    reader, there = OwnClock(backend, 2), datetime.now(UTC) - HOUR
    backend.set_state(state(there=there))
    seen = found(reader)
    here = datetime.now(UTC)
    seen.last_heartbeats["here"] = here
    token = (reader.get_state() or (b"", None))[1]
    after = reader.set_state(pickle.dumps(seen), token)
    assert after is not None and after[2], "the reader's own is written"
    assert found(backend).last_heartbeats == {"there": there, "here": here}
    assert pickle.loads(after[0]).last_heartbeats == seen.last_heartbeats


def test_a_write_that_came_too_late_is_told_with_what_was_written_meanwhile(backend: C10dRendezvousBackend) -> None:
    reader = OwnClock(backend, 2)
    assert reader.get_state() is None
    reader.set_state(state(here=datetime.now(UTC)))
    old = (reader.get_state() or (b"", None))[1]
    backend.set_state(state(there=datetime.now(UTC) + HOUR), old)
    answer = reader.set_state(state(here=datetime.now(UTC)), old)
    assert answer is not None and not answer[2]
    assert list(pickle.loads(answer[0]).last_heartbeats) == ["there"]


def test_the_last_call_is_waited_for_from_when_it_was_heard(backend: C10dRendezvousBackend) -> None:
    reader, before = OwnClock(backend, 2), datetime.now(UTC)
    backend.set_state(pickle.dumps(SimpleNamespace(last_heartbeats={}, deadline=before - HOUR)))
    assert before + timedelta(seconds=2) <= found(reader).deadline <= datetime.now(UTC) + timedelta(seconds=2)
