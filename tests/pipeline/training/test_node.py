from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.contract.restarts import read_attempts, record_event
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DeviceFault, PipelineError, StageError, read_error, write_error
from pipeline.system.processes import AgentStatus
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
    return TrainingNode(run, root, {**os.environ}, joined=joined, train=Train.model_validate(settings))


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


@pytest.mark.parametrize(
    ("present", "found"), [(1, r"1 of 2 machines came within 50 s"), (3, "3 machines did not meet within 50 s")]
)
def test_too_few_machines_are_an_error(
    present: int, found: str, new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_node(new_run(), tmp_path)
    monkeypatch.setattr(training.presence, "count", lambda: present)
    set_stores(training, monkeypatch)
    set_statuses(training, monkeypatch, AgentStatus.TOO_FEW)
    with pytest.raises(StageError, match=rf"train\.nodes=2: {found}; to fix it, .*pipe join"):
        training.train_to_end()


def lose_device(run: Run) -> None:
    record_event(run.path, event="end", attempt=0, host="here", reason="rank 3 on here: its GPU failed: ECC error")


@pytest.mark.parametrize("joined", [False, True])
def test_a_machine_without_its_device_takes_no_further_part(
    joined: bool, new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, joined, nodes=2 if joined else 1)
    monkeypatch.setattr(training, "wait_for_rendezvous", lambda took_part: Rendezvous("head:1", "1"))
    set_statuses(training, monkeypatch, AgentStatus.LOST_DEVICE)
    lose_device(run)
    host = socket.gethostname()
    with pytest.raises(DeviceFault, match=rf"a GPU of {host} is gone \(rank 3 on here: its GPU failed: ECC error\)"):
        training.train_to_end()


def test_the_machine_with_the_store_keeps_it_for_the_others(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    training = training_node(run, tmp_path)
    stores = set_stores(training, monkeypatch)
    set_statuses(training, monkeypatch, AgentStatus.LOST_DEVICE)
    lose_device(run)
    open_stores = []

    def count_others() -> int:
        open_stores.append(list(stores))
        if len(open_stores) == 3:
            (run.partial("train") / "summary.json").write_text("{}")
        return 1

    monkeypatch.setattr(training.presence, "count_others", count_others)
    training.train_to_end()
    assert open_stores == [["open"]] * 3
    assert stores == ["open", "close"]
    assert "the other machines go on" in capsys.readouterr().out


def test_the_machine_with_the_store_gives_up_if_the_others_are_gone(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, timeout_seconds=1)
    monkeypatch.setattr(node, "meeting_seconds", lambda seconds: seconds)
    set_stores(training, monkeypatch)
    set_statuses(training, monkeypatch, AgentStatus.LOST_DEVICE)
    lose_device(run)
    with pytest.raises(DeviceFault, match="is gone"):
        training.train_to_end()


def test_machines_that_are_present_are_counted(new_run: NewRun) -> None:
    own = NodePresence(new_run())
    own.renew()
    assert (own.count(), own.count_others()) == (1, 1)
    own.remove()
    assert own.count_others() == 0


@pytest.mark.parametrize("chosen", ["", "eth7"])
def test_processes_meet_on_the_interface_that_leads_to_the_others(
    chosen: str, new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[Mapping[str, str]] = []

    class Launcher:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        def launch(self, _argv: object, _log: object, env: Mapping[str, str]) -> int:
            environments.append(env)
            return 0

    monkeypatch.setattr(node, "LocalLauncher", Launcher)
    training = training_node(new_run(), tmp_path)
    own_choice = {"NCCL_SOCKET_IFNAME": chosen} if chosen else {}
    training.env = {"PATH": "/bin", **own_choice}
    training._run_launcher(Rendezvous("127.0.0.1:1", "1"))
    name = network_interface("127.0.0.1")
    assert environments[0]["GLOO_SOCKET_IFNAME"] == name
    assert environments[0]["NCCL_SOCKET_IFNAME"] == (chosen or f"={name}")


@pytest.fixture
def joining(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingNode:
    """A machine that joins."""
    run = new_run()
    training = training_node(run, tmp_path, joined=True)
    monkeypatch.setattr(training, "wait_for_rendezvous", lambda took_part: Rendezvous("head:1", "1"))
    set_statuses(training, monkeypatch, AgentStatus.DONE)
    return training


def test_a_machine_with_the_same_software_joins(joining: TrainingNode) -> None:
    software = node.describe_software(joining.run, joining.root)
    assert {"python", "torch", "task.py", "codec.py"} <= software.keys()
    publish_rendezvous(joining.run, "head:1", {**software, "a package of later versions": "1"})
    joining.train_to_end()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"torch": "2.0.1"},
            r"has torch \S+, and the machine that leads training has torch 2\.0\.1; to fix it",
        ),
        ({"python": "3.1"}, r"has python 3\.\d+, and the machine that leads training has python 3\.1; to fix it"),
        (
            {"task.py": "with digest 0"},
            "has task.py with digest .*, and the machine that leads training has task.py",
        ),
    ],
)
def test_a_machine_with_other_software_does_not_join(
    changes: dict[str, str], message: str, joining: TrainingNode
) -> None:
    software = node.describe_software(joining.run, joining.root)
    publish_rendezvous(joining.run, "head:1", {**software, **changes})
    with pytest.raises(ConfigError, match=message):
        joining.train_to_end()


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
    publish_rendezvous(leading.run, leading.train.rendezvous, {})
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
    published = [publish_rendezvous(joining.run, joining.train.rendezvous, {})]

    def connect(address: str) -> bool:
        if len(published) == 1:
            published.append(publish_rendezvous(joining.run, address, {}))
        return True

    monkeypatch.setattr(node, "is_listening", connect)
    assert joining.wait_for_rendezvous(took_part=False) == published[-1]
    assert len(published) == 2


def test_newest_rendezvous_is_found_until_it_is_withdrawn(new_run: NewRun) -> None:
    run = new_run()
    assert read_rendezvous(run) is None
    first = publish_rendezvous(run, "head:29500", {})
    second = publish_rendezvous(run, "head:29500", {})
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


def test_restarts_close_together_have_a_line_each(
    new_run: NewRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, nodes=1, restarts=3)
    record_event(run.path, event="launch", attempt=0)
    record_event(run.path, event="start", attempt=1, hosts=["here"], processes=1)
    for attempt, reason in ((1, "rank 0 was killed"), (2, "the node was killed")):
        record_event(run.path, event="end", attempt=attempt, host="here", reason=reason)
        record_event(run.path, event="start", attempt=attempt + 1, hosts=["here"], processes=1)
    training.output.update()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 was killed; starting again from the beginning (1 of 3 without a new one)",
        "the node was killed; starting again from the beginning (2 of 3 without a new one)",
    ]


@pytest.mark.parametrize("joined", [False, True])
def test_no_machine_waits_for_others_once_training_is_complete(
    joined: bool, new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run()
    training = training_node(run, tmp_path, joined=joined)
    (run.partial("train") / "summary.json").write_text("{}")
    launches, stores = set_statuses(training, monkeypatch), set_stores(training, monkeypatch)
    training.train_to_end()
    assert not launches
    assert not stores


def test_loss_of_the_leading_pod_counts_as_a_restart(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr(TrainingNode, "train_to_end", lambda _self: None)
    monkeypatch.setenv(node.POD_NUMBER, "0")
    train = Train(processes=1)
    for attempt in (1, 2):  # the second pod has the number and name of the first
        node.run_node(run, Path(), joined=False, train=train)
        record_event(run.path, event="start", attempt=attempt, hosts=("train-0",), step=40)
    log = read_attempts(run.path)
    assert log.restarts == 1
    assert [attempt.after for attempt in log.attempts] == ["launch", "loss"]
    assert log.attempts[0].ends[0].reason == "the leading pod was lost"


def test_a_pod_after_a_permanent_error_is_a_new_launch(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr(TrainingNode, "train_to_end", lambda _self: None)
    monkeypatch.setenv(node.POD_NUMBER, "0")
    record_event(run.path, event="start", attempt=1, hosts=("train-0",))
    write_error(ConfigError("train.lr: too large"), run.partial("train"))
    node.run_node(run, Path(), joined=False, train=Train(processes=1))
    assert read_attempts(run.path).launched
    assert read_error(run.partial("train")) is None


def test_last_lines_of_processes_are_printed_on_sigterm(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = training_node(new_run(), tmp_path, nodes=1)
    monkeypatch.setenv(node.POD_NUMBER, "0")

    class Launcher:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        def launch(self, _argv: object, log: Path, _env: object) -> int:
            log.write_text("saved the checkpoint of step 40\n")
            raise SystemExit(143)

    monkeypatch.setattr(node, "LocalLauncher", Launcher)
    with pytest.raises(SystemExit):
        training.train_to_end()
    assert "saved the checkpoint of step 40" in capfd.readouterr().out
