from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.contract.restarts import read_attempts, record_event
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Train
from pipeline.system.errors import ConfigError, DeviceFault, PipelineError, StageError, read_error, write_error
from pipeline.system.processes import AgentStatus
from pipeline.training import node
from pipeline.training.launchers import POD_NUMBER, Rendezvous
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
    settings = {"nodes": 2, "rendezvous": f"127.0.0.1:{free_port()}", "timeout_seconds": 5, "processes": 1, **train}
    run.partial("train").mkdir(parents=True)
    run.log("train").parent.mkdir(exist_ok=True)
    return TrainingNode(run, root, {**os.environ}, joined=joined, train=Train.model_validate(settings))


class Machine(NamedTuple):
    """A node without processes and stores: its launcher ends with the statuses that the test has chosen."""

    training: TrainingNode
    launches: list[Rendezvous | None]  # the rendezvous of each launch
    stores: list[str]  # what happened to stores

    @property
    def run(self) -> Run:
        return self.training.run

    @property
    def ends(self) -> Sequence[str]:
        return [end.reason for end in read_attempts(self.run.path).ends]


MakeMachine = Callable[..., Machine]


@pytest.fixture
def machine(new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    monkeypatch.setattr(node, "_RESTART_PAUSE_SECONDS", 0.0)

    def make(*statuses: int, joined: bool = False, **train: object) -> Machine:
        made = Machine(training_node(new_run(), tmp_path, joined, **train), [], [])
        rest = list(statuses)

        def run_launcher(rendezvous: Rendezvous | None) -> tuple[int, str]:
            made.launches.append(rendezvous)
            return rest.pop(0), ""

        @contextmanager
        def run_store() -> Iterator[Rendezvous]:
            made.stores.append("open")
            yield Rendezvous("head:1", str(len(made.stores)))
            made.stores.append("close")

        monkeypatch.setattr(made.training, "_run_launcher", run_launcher)
        monkeypatch.setattr(made.training, "run_store", run_store)
        monkeypatch.setattr(made.training, "wait_for_rendezvous", lambda took_part: Rendezvous("head:1", "1"))
        return made

    return make


def test_lost_processes_are_started_again_until_training_is_complete(machine: MakeMachine) -> None:
    made = machine(-signal.SIGKILL, -signal.SIGKILL, AgentStatus.DONE, nodes=1, restarts=3)
    made.training.train_to_end()
    assert made.launches == [None] * 3
    assert made.ends == [f"the launcher on {socket.gethostname()} was killed (SIGKILL)"] * 2


def test_training_gives_up_after_the_allowed_restarts(machine: MakeMachine) -> None:
    made = machine(*[-signal.SIGKILL] * 3, nodes=1, restarts=1)
    with pytest.raises(StageError, match=r"was lost 2 times in a row from the beginning \(train.restarts=1\)"):
        made.training.train_to_end()
    assert len(made.launches) == 2


def test_a_permanent_failure_is_not_repeated(machine: MakeMachine) -> None:
    made = machine(3, nodes=1, restarts=3)
    with pytest.raises(PipelineError, match="exited with status 3"):
        made.training.train_to_end()
    assert len(made.launches) == 1


def test_leader_keeps_its_store_until_it_is_lost(machine: MakeMachine) -> None:
    made = machine(-signal.SIGKILL, AgentStatus.NO_STORE, AgentStatus.CLOSED, restarts=5)
    made.training.train_to_end()
    assert [launch and launch.id for launch in made.launches] == ["1", "1", "3"]
    assert made.stores == ["open", "close", "open", "close"]


def test_joined_machine_waits_for_a_new_store_without_deciding(
    machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(AgentStatus.NO_STORE, AgentStatus.NO_STORE, joined=True, restarts=0)
    found = [Rendezvous("head:1", "1"), Rendezvous("head:1", "2"), None]
    monkeypatch.setattr(made.training, "wait_for_rendezvous", lambda took_part: found.pop(0))
    made.training.train_to_end()
    assert made.ends == ["the store where machines meet was lost"] * 2


@pytest.mark.parametrize(
    ("present", "found"), [(1, r"1 of 2 machines came within 50 s"), (3, "3 machines did not meet within 50 s")]
)
def test_too_few_machines_are_an_error(
    present: int, found: str, machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(AgentStatus.TOO_FEW)
    monkeypatch.setattr(made.training.presence, "count", lambda: present)
    with pytest.raises(StageError, match=rf"train\.nodes=2: {found}; to fix it, .*pipe join"):
        made.training.train_to_end()
    in_pod = machine(AgentStatus.TOO_FEW)
    in_pod.training.env[POD_NUMBER] = "0"
    monkeypatch.setattr(in_pod.training.presence, "count", lambda: present)
    with pytest.raises(StageError, match=rf"{found}; to fix it, see why the Job's other pods do not start"):
        in_pod.training.train_to_end()


def lose_device(run: Run) -> None:
    record_event(run.path, event="end", attempt=0, host="here", reason="rank 3 on here: its GPU failed: ECC error")


@pytest.mark.parametrize("joined", [False, True])
def test_machine_with_a_failed_gpu_stops_training(joined: bool, machine: MakeMachine) -> None:
    made = machine(AgentStatus.LOST_DEVICE, joined=joined, nodes=2 if joined else 1)
    lose_device(made.run)
    host = socket.gethostname()
    with pytest.raises(DeviceFault, match=rf"a GPU of {host} is gone \(rank 3 on here: its GPU failed: ECC error\)"):
        made.training.train_to_end()


def test_the_machine_with_the_store_keeps_it_for_the_others(
    machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = machine(AgentStatus.LOST_DEVICE)
    lose_device(made.run)
    open_stores = []

    def count_others() -> int:
        open_stores.append(list(made.stores))
        if len(open_stores) == 3:
            (made.run.partial("train") / "summary.json").write_text("{}")
        return 1

    monkeypatch.setattr(made.training.presence, "count_others", count_others)
    made.training.train_to_end()
    assert open_stores == [["open"]] * 3
    assert made.stores == ["open", "close"]
    assert "the other machines go on" in capsys.readouterr().out


def test_the_machine_with_the_store_gives_up_if_the_others_are_gone(
    machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = machine(AgentStatus.LOST_DEVICE, timeout_seconds=1)
    monkeypatch.setattr(node, "meeting_seconds", lambda seconds: seconds)
    lose_device(made.run)
    with pytest.raises(DeviceFault, match="is gone"):
        made.training.train_to_end()


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
def joining(machine: MakeMachine) -> TrainingNode:
    """A machine that joins."""
    return machine(AgentStatus.DONE, joined=True).training


def test_a_machine_with_the_same_software_joins(joining: TrainingNode) -> None:
    software = node.describe_software(joining.run, joining.root)
    assert {"python", "torch", "task.py", "codec.py"} <= software.keys()
    publish_rendezvous(joining.run, "head:1", {**software, "a package of later versions": "1"})
    joining.train_to_end()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch": "2.0.1"}, r"has torch \S+, and the machine that leads training has torch 2\.0\.1; to fix it"),
        ({"python": "3.1"}, r"has python 3\.\d+, and the machine that leads training has python 3\.1; to fix it"),
        ({"task.py": "with digest 0"}, "has task.py with digest .*, and the machine that leads training has task.py"),
    ],
)
def test_a_machine_with_other_software_does_not_join(
    changes: dict[str, str], message: str, joining: TrainingNode
) -> None:
    software = node.describe_software(joining.run, joining.root)
    publish_rendezvous(joining.run, "head:1", {**software, **changes})
    with pytest.raises(ConfigError, match=message):
        joining.train_to_end()


def test_ends_recorded_by_the_agent_are_not_recorded_twice(machine: MakeMachine) -> None:
    made = machine(AgentStatus.FAILED, AgentStatus.DONE, nodes=1, restarts=1)
    record_event(made.run.path, event="end", attempt=0, host="here", reason="rank 0 was killed")
    made.training.train_to_end()
    assert made.ends == ["rank 0 was killed"]


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
    own.renew()
    assert (own.count_others(), own.count()) == (1, 1), "it has not left yet"
    other = run.path / "logs" / "nodes" / "other-7"
    other.touch()
    assert own.count() == 2
    long_ago = other.stat().st_mtime - 2 * node._ABSENT_AFTER_SECONDS
    os.utime(other, (long_ago, long_ago))
    assert own.count() == 1
    own.remove()
    assert own.count_others() == 0
    assert sorted(path.name for path in other.parent.iterdir()) == ["other-7"]


def test_restarts_close_together_have_a_line_each(machine: MakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
    made = machine(nodes=1, restarts=3)
    record_event(made.run.path, event="launch", attempt=0)
    record_event(made.run.path, event="start", attempt=1, hosts=["here"], processes=1)
    for attempt, reason in ((1, "rank 0 was killed"), (2, "the node was killed")):
        record_event(made.run.path, event="end", attempt=attempt, host="here", reason=reason)
        record_event(made.run.path, event="start", attempt=attempt + 1, hosts=["here"], processes=1)
    made.training.output.update()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0 was killed; starting again from the beginning (1 of 3 without a new one)",
        "the node was killed; starting again from the beginning (2 of 3 without a new one)",
    ]


@pytest.mark.parametrize("joined", [False, True])
def test_no_machine_waits_for_others_once_training_is_complete(joined: bool, machine: MakeMachine) -> None:
    made = machine(joined=joined)
    (made.run.partial("train") / "summary.json").write_text("{}")
    made.training.train_to_end()
    assert (made.launches, made.stores) == ([], [])


def test_loss_of_the_leading_pod_counts_as_a_restart(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run()
    monkeypatch.setattr(TrainingNode, "train_to_end", lambda _self: None)
    monkeypatch.setenv(POD_NUMBER, "0")
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
    monkeypatch.setenv(POD_NUMBER, "0")
    record_event(run.path, event="start", attempt=1, hosts=("train-0",))
    write_error(ConfigError("train.lr: too large"), run.partial("train"))
    node.run_node(run, Path(), joined=False, train=Train(processes=1))
    assert read_attempts(run.path).launched
    assert read_error(run.partial("train")) is None


def test_last_lines_of_processes_are_printed_on_sigterm(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    training = training_node(new_run(), tmp_path, nodes=1)
    monkeypatch.setenv(POD_NUMBER, "0")

    class Launcher:
        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        def launch(self, _argv: object, log: Path, _env: object) -> int:
            log.write_text("saved the checkpoint of step 40\n")
            raise SystemExit(143)

    monkeypatch.setattr(node, "LocalLauncher", Launcher)
    with pytest.raises(SystemExit):
        training.train_to_end()
    assert "saved the checkpoint of step 40" in capfd.readouterr().out
