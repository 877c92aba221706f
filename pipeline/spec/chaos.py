"""What `pipe chaos` and the processes it kills tell each other: a schedule, and a record that outlives them all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.spec.files import write_json
from pipeline.spec.frozen import Frozen

VARIABLE = "PIPE_CHAOS"  # names the folder

Place = Literal["start", "moment", "step", "ledger", "write", "rename", "renamed"]


class Kill(Frozen):
    """One kill -9. It is due when the kills before it were made, and training has come to `step` since then."""

    place: Place  # `start` and `moment` are any place: whoever watches from outside kills there
    step: int  # steps that are done by then, at least
    who: Literal["worker", "launcher", "pipe"] = "worker"
    rank: int = 0  # of the worker
    share: float = 0.0  # of the time there is for it, when it comes from outside
    hold: int = 0  # a kill from outside: training goes no further than this step before it


class Event(Frozen):
    """A line of the record."""

    event: Literal["born", "step", "ready", "kill"]
    time: float
    number: int = -1  # of a kill
    rank: int = -1
    pid: int = 0
    parent: int = 0
    born: float = 0.0  # when the process that writes it was born
    step: int = 0


@dataclass(frozen=True)
class Record:
    """A folder: `schedule.json`, `events.jsonl`, and one empty file for each kill that was made."""

    folder: Path

    def schedule(self, kills: Iterable[Kill]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "schedule.json", [kill.model_dump() for kill in kills])

    def kills(self) -> tuple[Kill, ...]:
        return tuple(Kill.model_validate(body) for body in json.loads((self.folder / "schedule.json").read_text()))

    def next(self) -> int:
        """The number of the first kill that nobody has claimed."""
        number = 0
        while self.claimed(number):
            number += 1
        return number

    def claimed(self, number: int) -> bool:
        return self._claim(number).exists()

    def claim(self, number: int) -> bool:
        """Whether the kill is ours to make; of several that ask, one is told so."""
        try:
            self._claim(number).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def tell(self, event: Event) -> None:
        """One write, synced: the writer may be gone the moment after."""
        handle = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, event.model_dump_json().encode() + b"\n")
            os.fsync(handle)
        finally:
            os.close(handle)

    def events(self) -> list[Event]:
        if not self._events.exists():
            return []
        return [Event.model_validate_json(line) for line in self._events.read_text().splitlines()]

    def size(self) -> int:
        return self._events.stat().st_size if self._events.exists() else 0

    @property
    def _events(self) -> Path:
        return self.folder / "events.jsonl"

    def _claim(self, number: int) -> Path:
        return self.folder / f"kill-{number}"


def now() -> float:
    """One clock for all processes of a machine."""
    return time.time()
