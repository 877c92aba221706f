"""Two machines whose clocks are an hour apart, on one store."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from train.heartbeats import OwnClock

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
