from __future__ import annotations

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.spec.files import write_json
from pipeline.spec.rank import Rank
from train import meeting
from train.meeting import meet, place_of

FIRST, SECOND = (Rank(rank, rank, 2, local_size=2, job="a") for rank in (0, 1))


def test_the_first_process_opens_and_the_others_find_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(meet, SECOND, "", tmp_path, 20)
        opened = meet(FIRST, "", tmp_path, 20)
        found = waits.result(timeout=20)
    assert opened is not None
    assert found is not None
    opened.set("word", "said")
    assert found.get("word") == b"said"


def test_processes_of_one_machine_meet_where_no_other_machine_comes(tmp_path: Path) -> None:
    store = meet(FIRST, "", tmp_path, 5)
    told = json.loads(place_of(FIRST, tmp_path).read_text())
    assert told["host"] == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", told["port"]), timeout=5)
    assert store is not None


def test_processes_of_several_machines_meet_at_the_name_of_the_first(tmp_path: Path) -> None:
    store = meet(Rank(0, 0, 2, local_size=1), "", tmp_path, 5)
    told = json.loads((tmp_path / "meeting-unnamed.json").read_text())
    assert told["host"] == socket.gethostname()
    socket.create_connection(("127.0.0.2", told["port"]), timeout=5).close()
    assert store is not None


def test_an_address_where_nobody_answers_is_not_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_json(place_of(SECOND, tmp_path), {"host": "127.0.0.1", "port": port, "mark": "old"})
    assert meeting._knock(place_of(SECOND, tmp_path)) is None


def test_the_store_of_another_launch_is_not_taken(tmp_path: Path) -> None:
    """Its port was given anew: the address left behind leads to a living store, but not to ours."""
    store = meet(FIRST, "", tmp_path, 5)
    place = place_of(FIRST, tmp_path)
    assert meeting._knock(place) is not None
    write_json(place, {**json.loads(place.read_text()), "mark": "old"})
    assert meeting._knock(place) is None
    assert store is not None


def test_what_is_no_store_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_KNOCK_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        write_json(tmp_path / "place", {"host": "127.0.0.1", "port": other.getsockname()[1], "mark": "old"})
        told = pool.submit(meeting._knock, tmp_path / "place")
        while not told.done():
            other.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                guest, _ = other.accept()
                guest.close()
        assert told.result(timeout=20) is None


def test_a_place_the_launcher_or_the_user_told_comes_before_ones_own(tmp_path: Path) -> None:
    assert meet(Rank(0, 0, 2, master="head:29500"), "other:1", tmp_path, 5) is None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(meet, rank, f"127.0.0.1:{port}", tmp_path, 20) for rank in (SECOND, FIRST)]
        assert None not in [wait.result(timeout=30) for wait in waits]
    assert list(tmp_path.iterdir()) == []
