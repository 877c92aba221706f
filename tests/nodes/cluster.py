"""Three machines that share a folder, the `pipe` commands typed on them, and how far training has come."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.network import network
from pipeline.contract.restarts import Event, newest_attempt, read_events
from pipeline.contract.run import Run, all_runs

from ..e2e.project_folder import PIPE, ProjectFolder, environment, wait_for
from .machine import Machine

# Any number of processes gives the same bits, so that the results after faults can be compared.
TRAINING = (
    "train.processes=1", "train.elastic_shards=4", "train.epochs=25", "train.log_every=1", "train.checkpoint_every=0",
    "train.timeout_seconds=12",
    "train.restarts=9",  # faults come faster here than checkpoints
)  # fmt: skip
_PORT = 29400
_STEP_SECONDS = 0.4  # slow enough that training does not end before the last fault
_SECONDS = 300  # timeout for the recovery from a fault on a busy machine
_PACE = """            time.sleep(float(PACE.read_text()))
            while HOLD"""


@dataclass
class Command:
    """A `pipe` command on one of the machines; its output goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def text(self) -> str:
        return self.output.read_text()

    def ends(self, expect: int = 0, seconds: float = 300) -> str:
        assert self.process.wait(timeout=seconds) == expect, self.text
        return self.text


@dataclass
class Cluster:
    """Running machines; the first one is the coordinator."""

    project: ProjectFolder
    machines: tuple[Machine, ...]
    arguments: tuple[str, ...]  # of `pipe run train`
    environments: dict[str, Mapping[str, str]] = field(default_factory=dict)  # environment variables of a machine
    commands: dict[str, Command] = field(default_factory=dict)  # the last one of each machine
    count: int = 0  # of all commands

    def start_all(self) -> None:
        """Start `pipe run` on the first machine, and `pipe join` on the others."""
        first, *others = self.machines
        self.type(first, "run", "train", *self.arguments)
        wait_for(lambda: all_runs(self.project.runs) and (self.run.path / "logs" / "train.log").exists())
        for machine in others:
            self.join(machine)

    def join(self, machine: Machine) -> None:
        self.type(machine, "join", self.run.id)

    def type(self, machine: Machine, *words: str) -> None:
        """Start a `pipe` command on a machine."""
        env = environment(self.environments.get(machine.name, {}))
        output = self.project.folder.with_name(f"{machine.name}-{self.count}-{words[0]}.txt")
        self.count += 1
        with output.open("wb") as file:
            process = machine.start([*PIPE, *words], self.project.folder, env, file)
        self.commands[machine.name] = Command(process, output)

    def resume(self) -> None:
        """Resume on the first machine, and join on others whose command has ended."""
        first, *others = self.machines
        self.type(first, "run", "--resume", self.run.id)
        for machine in others:
            if self.commands[machine.name].process.poll() is not None:
                self.join(machine)

    def terminate(self, machine: Machine) -> None:
        """Send SIGTERM to the command on this machine, as an eviction does."""
        machine.processes("-m")[0].terminate()

    def pace(self, seconds: float) -> None:
        """Delay every step by so many seconds."""
        path = self.project.folder / "pace"
        path.with_suffix(".new").write_text(str(seconds))
        path.with_suffix(".new").rename(path)

    def finish(self, expected: bytes) -> None:
        """Train to the end without delay; check that every sample was used once an epoch, and the weights."""
        self.pace(0)
        for command in self.commands.values():
            command.ends()
        assert "exactly once in each" in self.project.pipe("verify", self.run.id).stdout
        assert self.project.weights == expected

    @property
    def run(self) -> Run:
        return self.project.latest

    @property
    def events(self) -> list[Event]:
        return read_events(self.run.path)

    @property
    def attempt(self) -> int:
        return newest_attempt(self.events)

    @property
    def began(self) -> int:
        """Return the step from which the current attempt continued."""
        return [event for event in self.events if event.event == "start"][-1].step

    @property
    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        lines = lines_of(self.run.partial("train") / "metrics.jsonl")
        return max((line["step"] for line in lines), default=0)

    def wait_until_training(self, processes: int, steps: int = 3) -> None:
        """Wait until so many processes have made a few more steps together."""
        wait_for(lambda: self._world() == processes, _SECONDS)
        before = self.step
        wait_for(lambda: self.step >= before + steps and self._world() == processes, _SECONDS)

    def _world(self) -> int:
        """Return the number of processes of the current attempt."""
        events = [event for event in self.events if event.event in ("start", "end", "launch")]
        return events[-1].processes if events and events[-1].event == "start" else 0


@contextlib.contextmanager
def cluster(folder: Path, *words: str) -> Iterator[Cluster]:
    """Boot three machines for a project, and power them off at the end."""
    project = ProjectFolder.create(folder)
    project.replace("task.py", "HOLD = ", 'PACE = Path(__file__).with_name("pace")\nHOLD = ')
    project.replace("task.py", "            while HOLD", _PACE)
    with network(3) as hosts:
        machines = tuple(Machine(host) for host in hosts)
        try:
            for machine in machines:
                machine.boot()
            meeting = f"train.rendezvous={hosts[0].address}:{_PORT}"
            made = Cluster(project, machines, (*TRAINING, "train.nodes=2:3", meeting, *words))
            made.pace(_STEP_SECONDS)
            yield made
        finally:
            for machine in machines:
                machine.lose()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that is being written."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
