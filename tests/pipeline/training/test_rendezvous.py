from __future__ import annotations

import os
import socket

from pipeline.service.process import any_port
from pipeline.training import rendezvous
from pipeline.training.rendezvous import Presence, answers, interface, own_address, publish, published, withdraw

from ..conftest import NewRun


def test_a_meeting_is_found_until_it_is_withdrawn_and_never_the_one_before(new_run: NewRun) -> None:
    run = new_run()
    assert published(run) is None
    first = publish(run, "head:29500")
    second = publish(run, "head:29500")
    assert first != second
    assert published(run) == second
    withdraw(run)
    assert published(run) is None


def test_somebody_answers_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers(f"127.0.0.1:{server.getsockname()[1]}")
    assert not answers(f"127.0.0.1:{any_port()}")
    assert not answers("no.such.host.invalid:1")


def test_the_address_of_this_machine_is_the_one_that_leads_there() -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    assert interface("127.0.0.1").startswith("lo")
    assert interface("203.0.113.7") == ""


def test_machines_that_are_there_are_counted_and_those_that_fell_silent_are_not(new_run: NewRun) -> None:
    run = new_run()
    own = Presence(run)
    assert own.count() == 1
    other = run.path / "logs" / "nodes" / "other-7"
    other.touch()
    assert own.count() == 2
    long_ago = other.stat().st_mtime - 2 * rendezvous._SILENT_SECONDS
    os.utime(other, (long_ago, long_ago))
    assert own.count() == 1
    own.leave()
    assert sorted(path.name for path in other.parent.iterdir()) == ["other-7"]
