"""One training with kills: repeat `pipe run --resume` until it is done, and kill processes from outside."""

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

from pipeline.contract.errors import StageError
from pipeline.contract.run import Run
from pipeline.processes import child_process
from train.chaos_hooks import CHAOS_VARIABLE, ChaosEvent, ChaosLog, Kill

_POLL_SECONDS = 0.01
_LOG_LINES = 3

DueKill: TypeAlias = tuple[float, Kill] | None  # time and kill
NextKill: TypeAlias = Callable[[Sequence[ChaosEvent], float], DueKill]  # of the events and the start of the command


@dataclass(frozen=True)
class ReferenceTiming:
    """Durations of a training without kills; the times of random kills are derived from them."""

    start_seconds: float  # from the command to the first step
    hold_seconds: float  # duration of the steps in which a random kill can happen


@dataclass
class Attack:
    """The processes of one run; `on_events` is called after every event."""

    folder: Path  # of the project
    run: Run
    log: ChaosLog
    next_kill: NextKill
    hang_seconds: float
    on_events: Callable[[Sequence[ChaosEvent]], None]
    by_hand: int = 0  # resumes that should not have been necessary
    _events: list[ChaosEvent] = field(default_factory=list)
    _read: int = 0  # bytes of the log

    def train(self) -> None:
        """Train to the end through all kills; raise if that is impossible."""
        while True:
            before = len(kill_events(self._events))
            status, excused = self._run_command()
            if status == 0:
                return
            if len(kill_events(self._events)) == before:
                raise StageError(f"training ended without a kill: {self._last_lines()}")
            self.by_hand += not excused

    def _run_command(self) -> tuple[int, bool]:
        """Run one command; return its exit status and whether one of our kills explains it."""
        argv = ("python", "-m", "pipeline", "-C", str(self.folder), "run", "--resume", str(self.run.path))
        env = {"PYTHONSAFEPATH": "1", CHAOS_VARIABLE: str(self.log.folder)}
        started, excused = time.time(), False
        with self._output.open("ab") as output, child_process(argv, self.folder, env, output) as process:
            command_process = psutil.Process(process.pid)
            while process.poll() is None:
                self._read_events()
                excused |= self._kill(command_process, started)
                self._check_alive(started)
                time.sleep(_POLL_SECONDS)
        self._read_events()
        return process.returncode, excused

    def _read_events(self) -> None:
        if (size := self.log.size()) > self._read:  # parsing a hundred times per second would slow down training
            self._read, self._events = size, self.log.events()
            self.on_events(self._events)

    def _kill(self, command_process: psutil.Process, started: float) -> bool:
        """Make the next kill from outside if it is due; return whether it ends the command."""
        at, kill = self.next_kill(self._events, started) or (math.inf, None)
        if kill is None or time.time() < at:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself; retried after the restart
            own, descendants = [command_process, *command_process.children()], command_process.children(recursive=True)
            victim, moment = choose_victim(kill, self._events, command_process, descendants), time.time()
            if victim is not None:
                victim.send_signal(signal.SIGKILL)
                number = len(kill_events(self._events))
                self.log.claim(number)
                self.log.append(ChaosEvent(event="kill", time=moment, number=number, pid=victim.pid))
                self._read_events()
                return victim in own
        return False

    def _check_alive(self, started: float) -> None:
        last = max([started, self._last_write(), *(event.time for event in self._events)])
        if time.time() - last > self.hang_seconds:
            raise StageError(f"training has hung for {self.hang_seconds:.0f} s: {self._last_lines()}")

    def _last_write(self) -> float:
        """Return when the training log was last written."""
        try:
            return (self.run.partial("train") / "metrics.jsonl").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _last_lines(self) -> str:
        lines = [line for line in self._output.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-_LOG_LINES:]) or "no output"

    @property
    def _output(self) -> Path:
        return self.log.folder / "pipe.log"


def kill_events(events: Sequence[ChaosEvent]) -> list[ChaosEvent]:
    return [event for event in events if event.event == "kill"]


def no_kill(_events: Sequence[ChaosEvent], _started: float) -> DueKill:
    """Kill no process from outside."""
    return None


def next_scheduled_kill(
    kills: Sequence[Kill], timing: ReferenceTiming, events: Sequence[ChaosEvent], started: float
) -> DueKill:
    """Return the next kill if it comes from outside and its time is known."""
    done = kill_events(events)
    if len(done) >= len(kills):
        return None
    kill = kills[len(done)]
    if kill.place == "start":
        return max([started, *(event.time for event in done)]) + kill.share * timing.start_seconds, kill
    ready = [event for event in events if event.event == "ready" and event.number == len(done)]
    if kill.place == "moment" and ready:
        return ready[0].time + kill.share * timing.hold_seconds, kill
    return None


def choose_victim(
    kill: Kill, events: Sequence[ChaosEvent], command_process: psutil.Process, descendants: Sequence[psutil.Process]
) -> psutil.Process | None:
    """Return the process to kill, always a descendant of the command."""
    if kill.who == "pipe":
        return command_process
    if kill.place == "start":
        return max(descendants, key=lambda process: process.create_time(), default=None)
    rank = kill.rank if kill.who == "worker" else 0
    starts = [event for event in events if event.event == "born" and event.rank == rank]
    pid = (starts[-1].pid if kill.who == "worker" else starts[-1].parent) if starts else 0
    return next((process for process in descendants if process.pid == pid), None)
