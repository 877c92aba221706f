"""The schedule and the log of `pipe chaos`, by which it and the training processes know of each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.contract.settings.section import Frozen
from pipeline.system.files import write_json

CHAOS_VARIABLE = "PIPE_CHAOS"  # names the folder of the chaos log

HookPoint = Literal["step", "ledger", "write", "rename", "renamed"]  # places in the code of a training process
KillPoint = Literal["start", "moment", HookPoint]  # `start` and `moment` are anywhere: `pipe chaos` kills from outside
StorageFault = Literal["truncated", "flipped", "best", "zeroed", "unreadable"]  # made before training is resumed
Fault = Literal["kill", "pause", "disk", "clock", "half-open", "store", "resume", StorageFault]


class Kill(Frozen):
    """One planned kill -9 or other fault. It is due once those before it have happened and training has reached `step`.

    `pause` stops a process (SIGSTOP) for some seconds. `disk` makes a write of a checkpoint fail, as on a full disk.
    `clock` moves a process's clock by some seconds. `half-open` drops what arrives over a process's connections: both
    ends believe that they are alive, and the others that they have sent their data. `store` kills the first worker and
    its launcher, which has the store where processes meet. The others kill `pipe`: then a shard of the newest
    checkpoint is `truncated` or `flipped`, or that of the `best` is NULs, or another file of the run is (`zeroed`), or
    another run is `unreadable`, or two commands `resume` at once.
    """

    place: KillPoint
    step: int  # steps that are done by then, at least
    who: Literal["worker", "launcher", "server", "pipe"] = "worker"  # server: the fork server
    rank: int = 0  # of the worker
    share: float = 0.0  # of the time there is for it, when it comes from outside
    fault: Fault = "kill"
    seconds: float = 0.0  # of a pause, or by which the clock is moved
    hold: int = 0  # before a kill from outside, training stops after this step


class ChaosEvent(Frozen):
    """A line of the log."""

    event: Literal["born", "step", "ready", "kill", "recovered"]
    time: float
    number: int = -1  # of a kill
    rank: int = -1
    pid: int = 0
    parent: int = 0
    born: float = 0.0  # start time of the process that wrote the line
    step: int = 0


@dataclass(frozen=True)
class ChaosLog:
    """A folder: `schedule.json`, `events.jsonl`, and one empty file for each kill that has happened."""

    folder: Path

    def write_schedule(self, kills: Iterable[Kill]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "schedule.json", [kill.model_dump() for kill in kills])

    def read_schedule(self) -> tuple[Kill, ...]:
        return tuple(Kill.model_validate(body) for body in json.loads((self.folder / "schedule.json").read_text()))

    def next_kill(self) -> int:
        """Return the number of the first kill that no process has claimed."""
        number = 0
        while self.is_claimed(number):
            number += 1
        return number

    def is_claimed(self, number: int) -> bool:
        return self._claim_file(number).exists()

    def claim(self, number: int) -> bool:
        """Return whether this caller may carry out the kill: exactly one of several callers may."""
        try:
            self._claim_file(number).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def append(self, event: ChaosEvent) -> None:
        """Write and sync one line at once: the writer may be killed a moment later."""
        handle = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, event.model_dump_json().encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def events(self) -> list[ChaosEvent]:
        if not self._events.exists():
            return []
        return [ChaosEvent.model_validate_json(line) for line in self._events.read_text().splitlines()]

    def size(self) -> int:
        return self._events.stat().st_size if self._events.exists() else 0

    @property
    def _events(self) -> Path:
        return self.folder / "events.jsonl"

    def _claim_file(self, number: int) -> Path:
        return self.folder / f"kill-{number}"
