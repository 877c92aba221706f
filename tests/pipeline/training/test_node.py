from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.contract.errors import PipelineError, StageError
from pipeline.contract.processes import AgentStatus
from pipeline.contract.restarts import read_attempts, record_event
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.training import node
from pipeline.training.launchers import Rendezvous
from pipeline.training.node import (
    NodePresence,
    TrainingNode,
    is_listening,
    network_interface,
    own_address,
    publish_rendezvous,
    read_rendezvous,
    withdraw_rendezvous,
)
from tests.ports import free_port

from ..conftest import NewRun


def training_node(run: Run, root: Path, joined: bool = False, **train: object) -> TrainingNode:
    settings = {
        "nodes": 2,
        "rendezvous": f"127.0.0.1:{free_port()}",
        "timeout_seconds": 5,
        "processes": 1,
        **train,
    }
    run.partial("train").mkdir(parents=True)
    run.log("train").parent.mkdir(exist_ok=True)
    return TrainingNode(run, root, os.environ, joined=joined, train=Train.model_validate(settings))


def set_statuses(training: TrainingNode, monkeypatch: pytest.MonkeyPatch, *statuses: int) -> list[Rendezvous | None]:
    """Let the launcher end with these statuses, one after the other; return where each launch met."""
    rest, launches = list(statuses), list[Rendezvous | None]()

    def run_launcher(rendezvous: Rendezvous | None) -> tuple[int, str]:
        launches.append(rendezvous)
        return rest.pop(0), ""

    monkeypatch.setattr(training, "_run_launcher", run_launcher)
    monkeypatch.setattr(node, "_RESTART_PAUSE_SECONDS", 0.0)
    return launches


def set_stores(training: TrainingNode, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Open no real store; return what happens to stores."""
    events: list[str] = []

    @contextmanager
    def run_store() -> Iterator[Rendezvous]:
        events.append("open")
        yield Rendezvous("head:1", str(len(events)))
        events.append("close")

    monkeypatch.setattr(training, "run_store", run_store)
    return events


def ends(run: Run) -> Sequence[str]:
    return [end.reason for end in read_attempts(run.path).ends]


def test_lost_processes_are_started_again_until_training_is_complete(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, nodes=1, restarts=3)
    launches = set_statuses(training, monkeypatch, -signal.SIGKILL, -signal.SIGKILL, AgentStatus.DONE)
    training.train_to_end()
    assert launches == [None] * 3
    assert ends(run) == [f"the launcher on {socket.gethostname()} was killed (SIGKILL)"] * 2


def test_training_gives_up_after_the_allowed_restarts(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_node(new_run(), tmp_path, nodes=1, restarts=1)
    launches = set_statuses(training, monkeypatch, *[-signal.SIGKILL] * 3)
    with pytest.raises(StageError, match=r"was lost 2 times in a row from the beginning \(train.restarts=1\)"):
        training.train_to_end()
    assert len(launches) == 2


def test_a_permanent_failure_is_not_repeated(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_node(new_run(), tmp_path, nodes=1, restarts=3)
    launches = set_statuses(training, monkeypatch, 3)
    with pytest.raises(PipelineError, match="exited with status 3"):
        training.train_to_end()
    assert len(launches) == 1


def test_leader_keeps_its_store_until_it_is_lost(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_node(new_run(), tmp_path, restarts=5)
    stores = set_stores(training, monkeypatch)
    statuses = (-signal.SIGKILL, AgentStatus.NO_STORE, AgentStatus.CLOSED)
    launches = set_statuses(training, monkeypatch, *statuses)
    training.train_to_end()
    assert [launch and launch.id for launch in launches] == ["1", "1", "3"]
    assert stores == ["open", "close", "open", "close"]


def test_joined_machine_waits_for_a_new_store_without_deciding(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, joined=True, restarts=0)
    found = [Rendezvous("head:1", "1"), Rendezvous("head:1", "2"), None]
    monkeypatch.setattr(training, "wait_for_rendezvous", lambda took_part: found.pop(0))
    set_statuses(training, monkeypatch, AgentStatus.NO_STORE, AgentStatus.NO_STORE)
    training.train_to_end()
    assert ends(run) == ["the store where machines meet was lost"] * 2


def test_too_few_machines_are_an_error(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = training_node(new_run(), tmp_path)
    set_stores(training, monkeypatch)
    set_statuses(training, monkeypatch, AgentStatus.TOO_FEW)
    with pytest.raises(StageError, match=r"train\.nodes=2: 1 of 2 machines came within 5 s; to fix it, .*pipe join"):
        training.train_to_end()


def test_ends_recorded_by_the_agent_are_not_recorded_twice(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, nodes=1, restarts=1)
    record_event(run.path, event="end", attempt=0, host="here", reason="rank 0 was killed")
    set_statuses(training, monkeypatch, AgentStatus.FAILED, AgentStatus.DONE)
    training.train_to_end()
    assert ends(run) == ["rank 0 was killed"]


def test_old_rendezvous_is_withdrawn_before_the_new_store_listens(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading = training_node(new_run(), tmp_path)
    publish_rendezvous(leading.run, leading.train.rendezvous)
    published: list[Rendezvous | None] = []

    def connect(address: str) -> bool:
        published.append(read_rendezvous(leading.run))
        return is_listening(address)

    monkeypatch.setattr(node, "is_listening", connect)
    with leading.run_store() as rendezvous:
        assert read_rendezvous(leading.run) == rendezvous
    assert set(published) == {None}


def test_rendezvous_replaced_while_connecting_is_the_one_used(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining = training_node(new_run(), tmp_path, joined=True)
    published = [publish_rendezvous(joining.run, joining.train.rendezvous)]

    def connect(address: str) -> bool:
        if len(published) == 1:
            published.append(publish_rendezvous(joining.run, address))
        return True

    monkeypatch.setattr(node, "is_listening", connect)
    assert joining.wait_for_rendezvous(took_part=False) == published[-1]
    assert len(published) == 2


def test_newest_rendezvous_is_found_until_it_is_withdrawn(new_run: NewRun) -> None:
    run = new_run()
    assert read_rendezvous(run) is None
    first = publish_rendezvous(run, "head:29500")
    second = publish_rendezvous(run, "head:29500")
    assert first != second
    assert read_rendezvous(run) == second
    withdraw_rendezvous(run)
    assert read_rendezvous(run) is None


def test_is_listening_detects_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert is_listening(f"127.0.0.1:{server.getsockname()[1]}")
    assert not is_listening(f"127.0.0.1:{free_port()}")
    assert not is_listening("no.such.host.invalid:1")


def test_own_address_is_the_one_on_the_route() -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    assert network_interface("127.0.0.1").startswith("lo")
    assert network_interface("203.0.113.7") == ""


def test_machines_without_a_recent_sign_of_life_are_not_counted(new_run: NewRun) -> None:
    run = new_run()
    own = NodePresence(run)
    assert own.count() == 1
    other = run.path / "logs" / "nodes" / "other-7"
    other.touch()
    assert own.count() == 2
    long_ago = other.stat().st_mtime - 2 * node._ABSENT_AFTER_SECONDS
    os.utime(other, (long_ago, long_ago))
    assert own.count() == 1
    own.remove()
    assert sorted(path.name for path in other.parent.iterdir()) == ["other-7"]
