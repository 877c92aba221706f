"""One machine of a training job: `python -m pipeline.training.node RUN` starts its processes and watches them.

This is the command of the train step, here and in a pod. With `--join`, another machine leads: it runs the pipeline
and publishes where the machines meet. When processes end too early, `restart_after` decides whether they start again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pipeline.contract.config import override_config
from pipeline.contract.restarts import (
    LAUNCHER_END_SECONDS,
    GiveUp,
    ProcessEnd,
    attempt_files,
    describe_restart,
    first_cause,
    meeting_seconds,
    newest_attempt,
    read_attempts,
    read_events,
    record_end,
    record_event,
    restart_after,
)
from pipeline.contract.run import Run, make_partial
from pipeline.contract.settings.stages import Train
from pipeline.display import is_raw
from pipeline.executors.local import (
    LocalLauncher,
    child_process,
    count_gpus,
    fork_server,
    prepare_log,
    read_log_end,
    step_environment,
)
from pipeline.failures import MEMORY_HINT, find_killed_process
from pipeline.history import installed_versions
from pipeline.plan import RESTARTED_FLAG, STEP_KINDS, processes_per_node
from pipeline.system.errors import (
    ConfigError,
    DeviceFault,
    LostContact,
    PipelineError,
    StageError,
    clear_error,
    missing_module_in_log,
    read_error,
    write_error,
)
from pipeline.system.files import read_object, write_json
from pipeline.system.fork_server import has_server
from pipeline.system.processes import (
    AgentStatus,
    describe_exit,
    exit_by_exception,
    split_address,
    was_terminated,
    watch_parent,
)
from pipeline.system.sources import project_code
from pipeline.training.launchers import POD_NUMBER, Rendezvous, launch_command, launcher_environment, uses_agent

PASSING_EXIT_CODE = 75  # a batch system may try again
_COMPARED_PACKAGES = ("torch", "numpy", "pipe-road")
_RESTART_PAUSE_SECONDS = 0.5
_POLL_SECONDS = 0.2
_STORE_START_SECONDS = 60
_CONNECT_TIMEOUT_SECONDS = 3
_PRESENCE_SECONDS = 2.0  # between two signs of life of a machine
_ABSENT_AFTER_SECONDS = 15.0  # a shared folder may show signs of life late


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="pipeline.training.node", description="one machine of a training job")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", type=Path, default=Path(), help="project folder with task.py (default: here)")
    parser.add_argument("--join", action="store_true", help="take part in training that another machine leads")
    parser.add_argument(RESTARTED_FLAG, action="store_true", help="the node before this one was killed")
    for name in ("processes", "nodes", "rendezvous"):
        parser.add_argument(f"--{name}", help=f"override train.{name} of the run")
    options = parser.parse_args(argv)
    watch_parent()
    signal.signal(signal.SIGTERM, exit_by_exception)
    run, joined = Run(options.run.resolve()), options.join or os.environ.get(POD_NUMBER, "0") != "0"
    values = {name: getattr(options, name) for name in ("processes", "nodes", "rendezvous")}
    overrides = [f"train.{name}={value}" for name, value in values.items() if value is not None]
    restarted = getattr(options, RESTARTED_FLAG.removeprefix("--"))
    return run_node(run, options.root.resolve(), joined, override_config(run.config, overrides).train, restarted)


def run_node(run: Run, root: Path, joined: bool, train: Train, restarted: bool = False) -> int:
    """Train until training is complete or cannot continue, and return the exit status."""
    processes = processes_per_node(train, count_gpus(os.environ))
    env = {**os.environ, **step_environment(processes, os.cpu_count() or 1, train.threads)}
    try:
        make_partial(run, "train")
    except PipelineError as error:  # which cannot be written there
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    node = TrainingNode(run, root, env, joined, train)
    if not joined and not restarted:
        _record_start(run, node.host, in_pod=POD_NUMBER in env)
    try:
        node.train_to_end()
    except PipelineError as error:
        if not joined:
            write_error(error, run.partial("train"))
        print(f"error: {error}", file=sys.stderr)
        return PASSING_EXIT_CODE if error.passing else error.exit_code
    finally:
        node.presence.remove()
    return 0


def _record_start(run: Run, host: str, *, in_pod: bool) -> None:
    """Record that a person started or resumed training, or that this pod replaces one that was lost."""
    error, log = read_error(run.partial("train")), read_attempts(run.path)
    if in_pod and read_events(run.path) and (error is None or error.passing):
        if not log.launched:
            record_end(run.path, ProcessEnd(host, "the leading pod was lost"))
        return
    clear_error(run.partial("train"))
    record_event(run.path, event="launch", attempt=newest_attempt(read_events(run.path)))


@dataclass
class TrainingNode:
    """This machine: its training processes, its log, and what it prints."""

    run: Run
    root: Path
    env: dict[str, str]
    joined: bool
    train: Train

    def __post_init__(self) -> None:
        self.host = socket.gethostname()
        own_log = self.joined or POD_NUMBER in self.env  # `pipe` itself collects the logs of all pods of a Job
        self.log = self.run.log(f"train-{self.host}" if own_log else "train")
        self.per_node = processes_per_node(self.train, count_gpus(self.env))
        self.presence = NodePresence(self.run)
        self.output = NodeOutput(self.run, self.log, self.train.restarts)

    def train_to_end(self) -> None:
        """Start the training processes, and again as long as `restart_after` decides so."""
        leads_many = not self.joined and self.train.launcher == "torchrun" and self.train.most_nodes > 1
        rendezvous, attempts = None, 0
        with contextlib.ExitStack() as server, contextlib.ExitStack() as store:
            while not self._is_complete():  # then the other machines leave, too
                self._ensure_server(server)
                if leads_many and rendezvous is None:
                    rendezvous = store.enter_context(self.run_store())
                elif self.joined and (rendezvous := self.wait_for_rendezvous(took_part=attempts > 0)) is None:
                    return
                if self.joined and attempts == 0:
                    check_same_software(self.run, self.root)
                status, log = self._run_launcher(rendezvous)
                attempts += 1
                if status == AgentStatus.DONE or (rendezvous and status == AgentStatus.CLOSED):
                    return
                if rendezvous and status == AgentStatus.TOO_FEW:
                    raise self._too_few_machines()
                if status == AgentStatus.LOST_DEVICE:
                    self._leave(keeps_store=leads_many)
                    return
                end = self._find_end(status, log)
                if rendezvous and status == AgentStatus.NO_STORE:
                    store.close()
                    rendezvous = None
                    if self.joined and end is not None:  # the leading machine decides, and opens a new store
                        record_end(self.run.path, end)
                        continue
                self._pause_or_give_up(end)

    def _is_complete(self) -> bool:
        """Return whether the first process has written its last file, the summary."""
        outputs = (self.run.partial("train"), self.run.output("train"))
        return any((folder / "summary.json").exists() for folder in outputs)

    def _ensure_server(self, server: contextlib.ExitStack) -> None:
        """Run a fork server for the agent, unless `pipe` runs one and it has not been killed."""
        if uses_agent(self.train) and not has_server(self.env):
            server.close()
            self.env |= server.enter_context(fork_server(self.root, self.env, self.run.config))

    def _leave(self, keeps_store: bool) -> None:
        """Take no further part, because a GPU is gone; the machine with the store keeps it for the others."""
        fault = DeviceFault(
            f"a GPU of {self.host} is gone ({first_cause(read_attempts(self.run.path).ends)}); to fix it: restart the "
            f"machine, or leave it out, then `pipe run --resume {self.run.id}`"
        )
        self.presence.remove()
        if not keeps_store:
            raise fault
        print(f"{fault}; the other machines go on", flush=True)
        deadline = time.monotonic() + meeting_seconds(self.train.timeout_seconds)
        while not self._is_complete():
            self.output.update()
            self._raise_permanent_error()
            if self.presence.count_others():
                deadline = time.monotonic() + meeting_seconds(self.train.timeout_seconds)
            if time.monotonic() > deadline:
                raise fault
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def run_store(self) -> Iterator[Rendezvous]:
        """Run the store at which the machines meet, on this machine."""
        address = self.train.rendezvous
        withdraw_rendezvous(self.run)  # a lost machine may have left it: the new store must not answer to the old id
        argv = ("python", "-m", "train.elastic.store", str(self.run.path), address)
        with self.log.open("ab") as output, child_process(argv, self.root, self.env, output) as process:
            deadline = time.monotonic() + _STORE_START_SECONDS
            while not is_listening(address) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if process.poll() is not None:
                self._raise_permanent_error()
                raise StageError(f"train.rendezvous={address}: {describe_exit('the store there', process.wait())}")
            try:
                yield publish_rendezvous(self.run, address, describe_software(self.run, self.root))
            finally:
                withdraw_rendezvous(self.run)

    def wait_for_rendezvous(self, took_part: bool) -> Rendezvous | None:
        """Wait until the published store answers; None when training is complete.

        Until this machine has taken part, a recorded error is that of an earlier launch.
        """
        timeout, waits = meeting_seconds(self.train.timeout_seconds), False
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            rendezvous = read_rendezvous(self.run)
            if rendezvous is not None and is_listening(rendezvous.address) and rendezvous == read_rendezvous(self.run):
                return rendezvous
            if self._is_complete():
                return None
            if not waits:
                waits = True
                print(self._no_leader(f"waiting {timeout} s for it"), flush=True)
            self.presence.renew()
            if took_part:
                self._raise_permanent_error()
            time.sleep(_POLL_SECONDS)
        raise LostContact(self._no_leader(f"waited {timeout} s for it"))

    def _run_launcher(self, rendezvous: Rendezvous | None) -> tuple[int, str]:
        """Run the training processes to their end; return the launcher's exit status and the log of this launch."""
        own_host = own_address(rendezvous.address) if rendezvous else ""
        python = ("python", "-m", "train", str(self.run.path))
        argv = launch_command(self.train, self.per_node, python, rendezvous, own_host, self.log)
        env = {**launcher_environment(self.train, os.geteuid()), **self.env}
        if own_host and (name := network_interface(own_host)):
            env = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", **env}  # `=`: not as a beginning
        offset = prepare_log(self.log)
        launcher = LocalLauncher(self.root, self._tick, LAUNCHER_END_SECONDS, forks=uses_agent(self.train))
        try:
            status = launcher.launch(argv, self.log, env)
        finally:  # on SIGTERM, too: the last lines name the checkpoint
            self.output.update()
        return status, read_log_end(self.log, offset)

    def _tick(self) -> None:
        self.presence.renew()
        self.output.update()
        self._raise_permanent_error()

    def _find_end(self, status: int, log: str) -> ProcessEnd | None:
        """Return how the launcher ended; None where the agent has recorded that itself."""
        has_agent = uses_agent(self.train)
        if has_agent and status == AgentStatus.FAILED:
            return None
        error = read_error(self.run.partial("train"))
        killed = None if has_agent else find_killed_process(log)
        if killed is not None:
            return ProcessEnd(self.host, killed.summary)
        if has_agent and status == AgentStatus.NO_STORE:
            return ProcessEnd(self.host, "the store where machines meet was lost", echo=True)
        if error is not None:
            return ProcessEnd(self.host, str(error), error.echo, error.passing)
        if (missing := missing_module_in_log(log)) is not None:
            return ProcessEnd(self.host, str(missing), passing=False)
        reason = describe_exit(f"the launcher on {self.host}", status)
        return ProcessEnd(self.host, reason, passing=status < 0 or was_terminated(status))

    def _pause_or_give_up(self, end: ProcessEnd | None) -> None:
        decision = restart_after(self.run.path, end, self.train.restarts)
        self._raise_permanent_error()
        if isinstance(decision, GiveUp):
            raise StageError(describe_give_up(decision, self.train.restarts))
        time.sleep(_RESTART_PAUSE_SECONDS)

    def _raise_permanent_error(self) -> None:
        error = read_error(self.run.partial("train"))
        if error is not None and not error.passing:
            raise error

    def _too_few_machines(self) -> StageError:
        count, required = self.presence.count(), self.train.fewest_nodes
        found = f"{count} of {required} machines came" if count < required else f"{count} machines did not meet"
        advice = f"on each other machine, in this folder: pipe join {self.run.id}"
        if POD_NUMBER in self.env:
            advice = "see why the Job's other pods do not start, or do not reach this one"
        seconds = meeting_seconds(self.train.timeout_seconds)
        return StageError(f"train.nodes={self.train.nodes}: {found} within {seconds} s; to fix it, {advice}")

    def _no_leader(self, waiting: str) -> str:
        return (
            f"no machine leads training of {self.run.id} at the moment; {waiting}; to bring it back, on any machine "
            f"that has this folder: pipe run --resume {self.run.id}"
        )


def describe_give_up(decision: GiveUp, allowed: int) -> str:
    advice = MEMORY_HINT if decision.cause.endswith("(SIGKILL)") else ""
    if decision.times == 0 or allowed == 0:
        return f"{decision.cause}{advice}"
    start = f"the checkpoint of step {decision.step}" if decision.step else "the beginning"
    return (
        f"training was lost {decision.times} times in a row from {start} (train.restarts={allowed}), at last because "
        f"{decision.cause}{advice}"
    )


def publish_rendezvous(run: Run, address: str, software: Mapping[str, str]) -> Rendezvous:
    """Publish a store under a new id; machines that wait for an earlier one come to this one."""
    rendezvous = Rendezvous(address, secrets.token_hex(8))
    body = {"address": rendezvous.address, "id": rendezvous.id, "software": dict(software)}
    write_json(_rendezvous_file(run), body)
    return rendezvous


def describe_software(run: Run, root: Path) -> dict[str, str]:
    """Return what must be equal on all machines: versions without the build for a platform, and the user's code."""
    versions = {name: version.partition("+")[0] for name, version in installed_versions(_COMPARED_PACKAGES).items()}
    python = ".".join(platform.python_version_tuple()[:2])
    config = run.config
    code = project_code(root, (config.task, config.codec), STEP_KINDS["train"].unused)
    return {"python": python, **versions, **{name: f"with digest {digest[:8]}" for name, digest in code.items()}}


def check_same_software(run: Run, root: Path) -> None:
    """Refuse to join machines that would compute something else."""
    try:
        leading = read_object(_rendezvous_file(run)).get("software") or {}
    except PipelineError:  # withdrawn meanwhile
        return
    own = describe_software(run, root)
    for name in leading.keys() & own.keys():
        if leading[name] != own[name]:
            raise ConfigError(
                f"{socket.gethostname()} has {name} {own[name]}, and the machine that leads training has {name} "
                f"{leading[name]}; to fix it: install the same version here, or copy the same code"
            )


def read_rendezvous(run: Run) -> Rendezvous | None:
    try:
        body = read_object(_rendezvous_file(run))
        return Rendezvous(body["address"], body["id"])
    except (PipelineError, KeyError):
        return None


def withdraw_rendezvous(run: Run) -> None:
    _rendezvous_file(run).unlink(missing_ok=True)


def _rendezvous_file(run: Run) -> Path:
    return run.path / "rendezvous.json"


def is_listening(address: str) -> bool:
    try:
        socket.create_connection(split_address(address), _CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def own_address(address: str) -> str:
    """Return the address of this machine on the route to `address`: its host name may resolve to another one."""
    family, kind, _, _, target = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as datagram:  # nothing is sent
        datagram.connect(target)
        return str(datagram.getsockname()[0])


def network_interface(address: str) -> str:
    """Return the name of the network interface with this address; empty when there is none."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces for entry in entries if entry.address == address), "")


class NodePresence:
    """This machine's sign of life: a file in the run directory."""

    def __init__(self, run: Run) -> None:
        self._path = run.path / "logs" / "nodes" / f"{socket.gethostname()}-{os.getpid()}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._renewed = 0.0

    def renew(self) -> None:
        if time.monotonic() - self._renewed > _PRESENCE_SECONDS:
            self._renewed = time.monotonic()
            self._path.touch()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def count(self) -> int:
        """Count the machines that are present, by the clock of the file system, the only one they share."""
        self._path.touch()
        return self._count(self._path.parent.iterdir(), self._path.stat().st_mtime)

    def count_others(self) -> int:
        """Count the machines that are present, except this one, which has left."""
        with tempfile.NamedTemporaryFile(dir=self._path.parent.parent) as file:
            return self._count(self._path.parent.iterdir(), Path(file.name).stat().st_mtime)

    def _count(self, signs: Iterable[Path], current: float) -> int:
        return sum(current - _modified(path) < _ABSENT_AFTER_SECONDS for path in signs)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # that machine has just left
        return 0.0


class NodeOutput:
    """Prints each new attempt as a line, and the log where `pipe` does not already show it."""

    def __init__(self, run: Run, log: Path, restarts: int) -> None:
        self._run, self._log, self._restarts = run, log, restarts
        self._record_size = self._size()
        self._attempts = len(read_attempts(run.path).attempts)
        self._shown = log.stat().st_size if log.exists() else 0

    def update(self) -> None:
        """Print what is new since the last call."""
        self._show_log()
        if self._size() == self._record_size:
            return
        self._record_size = self._size()
        log = read_attempts(self._run.path)
        for count in range(self._attempts + 1, len(log.attempts) + 1):
            if text := describe_restart(replace(log, attempts=log.attempts[:count]), self._restarts):
                print(text, flush=True)
        self._attempts = len(log.attempts)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in attempt_files(self._run.path))

    def _show_log(self) -> None:
        if not self._log.exists() or os.path.samestat(os.fstat(1), self._log.stat()):
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            data = file.read()
        self._shown += len(data)
        if POD_NUMBER not in os.environ:  # a person reads this
            data = b"".join(
                line for line in data.splitlines(keepends=True) if not is_raw(line.decode(errors="replace"))
            )
        sys.stdout.buffer.write(data)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
