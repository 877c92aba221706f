"""Three machines that share a folder, the `pipe` commands typed on them, and how far training has come."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.network import network
from pipeline.history import all_runs
from pipeline.spec.run import Run

from ..e2e.walker import PIPE, Walker, environment, wait_for
from .machine import Machine

_PORT = 29400
_PACE = """            if PACE.exists():
                time.sleep(float(PACE.read_text()))
            while HOLD"""


@dataclass
class Command:
    """A `pipe` command on one of the machines; what it says goes to a file."""

    door: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    def ends(self, expect: int = 0, seconds: float = 90) -> str:
        assert self.door.wait(timeout=seconds) == expect, self.said
        return self.said


@dataclass
class Cluster:
    """All machines are on, and the first is where the road is walked."""

    walker: Walker
    machines: tuple[Machine, ...]
    words: tuple[str, ...]  # of `pipe run train`
    commands: dict[str, Command] = field(default_factory=dict)  # the newest of each machine

    def begin(self, **env: Mapping[str, str]) -> Run:
        """Start training on all machines; `env` is what one of them has in its environment."""
        first, *others = self.machines
        self.type(first, "run", "train", *self.words, env=env.get(first.name, {}))
        run: Run = wait_for(lambda: next(iter(all_runs(self.walker.runs)), None))
        for machine in others:
            self.join(machine, env.get(machine.name, {}))
        return run

    def join(self, machine: Machine, env: Mapping[str, str] | None = None) -> None:
        self.type(machine, "join", self.walker.latest.id, env=env or {})

    def type(self, machine: Machine, *words: str, env: Mapping[str, str]) -> None:
        output = self.walker.folder / f"{machine.name}-{len(list(self.walker.folder.glob('node*')))}.txt"
        with output.open("wb") as file:
            door = machine.start([*PIPE, *words], self.walker.folder, environment(env), file)
        self.commands[machine.name] = Command(door, output)

    def pace(self, seconds: float) -> None:
        """Every step takes that much longer; 0 lets training go to its end."""
        path = self.walker.folder / "pace"
        path.with_suffix(".new").write_text(str(seconds))
        path.with_suffix(".new").rename(path)
        if not seconds:
            path.unlink()

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return lines_of(self.walker.latest.path / "logs" / "attempts.jsonl")

    @property
    def step(self) -> int:
        """The last one told in the journal."""
        lines = lines_of(self.walker.latest.partial("train") / "metrics.jsonl")
        return max((line["step"] for line in lines), default=0)

    def trains(self, processes: int, steps: int = 3) -> None:
        """Wait until so many processes have made some more steps together."""
        wait_for(lambda: self._world() == processes)
        before = self.step
        wait_for(lambda: self.step >= before + steps and self._world() == processes)

    def _world(self) -> int:
        starts = [line for line in self.attempts if line["event"] == "start"]
        return int(starts[-1]["processes"]) if starts else 0


@contextlib.contextmanager
def cluster(folder: Path, *words: str) -> Iterator[Cluster]:
    """Everything is gone at the end, whatever happens."""
    walker = Walker.fresh(folder)
    walker.replace("task.py", "HOLD = ", 'PACE = Path(__file__).with_name("pace")\nHOLD = ')
    walker.replace("task.py", "            while HOLD", _PACE)
    with network(3) as hosts:
        machines = tuple(Machine(host) for host in hosts)
        try:
            for machine in machines:
                machine.boot()
            meeting = f"train.rendezvous={hosts[0].address}:{_PORT}"
            yield Cluster(walker, machines, (meeting, "train.processes=1", *words))
        finally:
            for machine in machines:
                machine.lose()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that somebody is writing."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
