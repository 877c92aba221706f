"""One training under attack: `pipe run --resume` as often as it takes, and the kills that come from outside."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import psutil

from pipeline.contract.attempts import CHAOS_VARIABLE, ChaosEvent, Kill, Record
from pipeline.contract.errors import StageError
from pipeline.contract.run import Run
from pipeline.processes import leashed

_POLL_SECONDS = 0.01
_TOLD_LINES = 3

DueKill: TypeAlias = tuple[float, Kill] | None  # when to kill whom
Due: TypeAlias = Callable[
    [Sequence[ChaosEvent], float], DueKill
]  # from what happened, and when the command was started


@dataclass(frozen=True)
class Timing:
    """Of a training that nobody disturbed; kills at random moments are drawn from it."""

    start_seconds: float  # from the command to the first step
    room_seconds: float  # that training takes for the steps between a moment's beginning and its end


@dataclass
class Attack:
    """The processes of one run; `told` hears of every kill."""

    folder: Path  # of the project
    run: Run
    record: Record
    due: Due
    patience_seconds: float
    told: Callable[[Sequence[ChaosEvent]], None]
    by_hand: int = 0  # resumes that training should not have needed
    _events: list[ChaosEvent] = field(default_factory=list)
    _read: int = 0  # bytes of the record

    def train(self) -> None:
        """To its end, through all kills; raises when it cannot be brought there."""
        while True:
            made = len(kills_of(self._events))
            status, excused = self._live()
            if status == 0:
                return
            if len(kills_of(self._events)) == made:
                raise StageError(f"training ended, though nobody killed it: {self._last_words()}")
            self.by_hand += not excused

    def _live(self) -> tuple[int, bool]:
        """One command; its exit status, and whether a kill of ours explains that."""
        argv = ("python", "-m", "pipeline", "-C", str(self.folder), "run", "--resume", str(self.run.path))
        env = {"PYTHONSAFEPATH": "1", CHAOS_VARIABLE: str(self.record.folder)}
        began, excused = time.time(), False
        with self._output.open("ab") as output, leashed(argv, self.folder, env, output) as process:
            pipe = psutil.Process(process.pid)
            while process.poll() is None:
                self._look()
                excused |= self._kill(pipe, began)
                self._check_alive(began)
                time.sleep(_POLL_SECONDS)
        self._look()
        return process.returncode, excused

    def _look(self) -> None:
        if (size := self.record.size()) > self._read:  # a hundred looks a second must not slow training down
            self._read, self._events = size, self.record.events()
            self.told(self._events)

    def _kill(self, pipe: psutil.Process, began: float) -> bool:
        """Make the kill that is due from outside; whether the command has to end with it."""
        at, kill = self.due(self._events, began) or (math.inf, None)
        if kill is None or time.time() < at:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):  # it is ending already: the next life will have it
            ours, below = [pipe, *pipe.children()], pipe.children(recursive=True)
            victim, moment = choose(kill, self._events, pipe, below), time.time()
            if victim is not None:
                victim.send_signal(signal.SIGKILL)
                number = len(kills_of(self._events))
                self.record.claim(number)
                self.record.tell(ChaosEvent(event="kill", time=moment, number=number, pid=victim.pid))
                self._look()
                return victim in ours
        return False

    def _check_alive(self, began: float) -> None:
        last = max([began, self._wrote(), *(event.time for event in self._events)])
        if time.time() - last > self.patience_seconds:
            raise StageError(f"training stands still for {self.patience_seconds:.0f} s: {self._last_words()}")

    def _wrote(self) -> float:
        """When the journal had its last line."""
        try:
            return (self.run.partial("train") / "metrics.jsonl").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _last_words(self) -> str:
        lines = [line for line in self._output.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-_TOLD_LINES:]) or "it said nothing"

    @property
    def _output(self) -> Path:
        return self.record.folder / "pipe.log"


def kills_of(events: Sequence[ChaosEvent]) -> list[ChaosEvent]:
    return [event for event in events if event.event == "kill"]


def never(_events: Sequence[ChaosEvent], _began: float) -> DueKill:
    """Nobody is killed from outside."""
    return None


def as_scheduled(kills: Sequence[Kill], timing: Timing, events: Sequence[ChaosEvent], began: float) -> DueKill:
    """The next kill, when it comes from outside and its time is known."""
    made = kills_of(events)
    if len(made) >= len(kills):
        return None
    kill = kills[len(made)]
    if kill.place == "start":
        return max([began, *(event.time for event in made)]) + kill.share * timing.start_seconds, kill
    ready = [event for event in events if event.event == "ready" and event.number == len(made)]
    if kill.place == "moment" and ready:
        return ready[0].time + kill.share * timing.room_seconds, kill
    return None


def choose(
    kill: Kill, events: Sequence[ChaosEvent], pipe: psutil.Process, below: Sequence[psutil.Process]
) -> psutil.Process | None:
    """Never a process that is not below ours."""
    if kill.who == "pipe":
        return pipe
    if kill.place == "start":
        return max(below, key=lambda process: process.create_time(), default=None)
    rank = kill.rank if kill.who == "worker" else 0
    born = [event for event in events if event.event == "born" and event.rank == rank]
    wanted = (born[-1].pid if kill.who == "worker" else born[-1].parent) if born else 0
    return next((process for process in below if process.pid == wanted), None)
