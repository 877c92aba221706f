"""Restarts of training: the record of its attempts, and the one decision whether it starts again.

Four kinds of process start one another: `pipe` starts the node, the node a launcher, and the launcher (an agent) the
training processes. Each of them only watches the process below it. When that process ends too early, the watcher calls
`restart_after`, which records the end in `logs/attempts/` of the run and decides; the watcher then starts the process
again or passes the exit status on. Nothing else decides about restarts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.contract.settings.section import Frozen

_FOLDER = "logs/attempts"  # a file for each machine: on NFS, lines that several append overwrite each other
POSITIONS = "logs/positions"  # where each process is, as its watchdog reports every few seconds


# How long the processes of training wait for each other. All of it follows from `train.timeout_seconds`: a process that
# makes no progress for so long counts as hung, and those that wait for it report it and end (train/watchdog.py).
PROCESS_END_SECONDS = 30  # from SIGTERM, upon which a training process saves a checkpoint, to SIGKILL by the agent
LAUNCHER_END_SECONDS = 40.0  # from SIGTERM to SIGKILL of the agent, by the node
STEP_END_SECONDS = 45.0  # from SIGTERM to SIGKILL of the node, by `pipe`
_LATER_SECONDS = 60


def collective_seconds(timeout_seconds: int) -> int:
    """Return how long a collective waits: longer than the watchdog, whose report is better."""
    return timeout_seconds + _LATER_SECONDS


def meeting_seconds(timeout_seconds: int) -> int:
    """Return how long a machine waits for others: before they come, they end the processes they have, hung ones too."""
    return timeout_seconds + PROCESS_END_SECONDS + 15


class Event(Frozen):
    """One line of the record.

    `launch`: a person started or resumed training. `start`: all processes are up and continue from `step`.
    `step`: the attempt's first step is done. `checkpoint`: its first checkpoint is written.
    `end`: processes of `host` ended too early.
    """

    event: Literal["launch", "start", "step", "checkpoint", "end"]
    attempt: int
    time: float
    number: int = 0  # above that of all events its writer knew; clocks of machines differ
    processes: int = 0
    hosts: tuple[str, ...] = ()  # of each rank
    step: int = 0
    reason: str = ""
    host: str = ""
    echo: bool = False  # they ended because others did
    passing: bool = True  # another attempt may well succeed
    since: float = 0.0  # the last progress; an end may be noticed only after a timeout


@dataclass(frozen=True)
class Attempt:
    number: int
    step: int  # of the checkpoint it started from; 0: from the beginning
    started: float
    hosts: tuple[str, ...]
    after: Literal["launch", "loss", "change"]  # a person, a failed attempt, machines that joined or left
    first_step_time: float | None = None
    has_checkpoint: bool = False  # it wrote one
    ends: tuple[Event, ...] = ()  # in the order they were recorded


@dataclass(frozen=True)
class AttemptLog:
    """All attempts, and the ends of processes since the last launch that came before an attempt had started."""

    attempts: tuple[Attempt, ...] = ()
    early_ends: tuple[Event, ...] = ()
    launched: bool = True  # no attempt has started since

    @property
    def restarts(self) -> int:
        """How often training started again by itself."""
        return sum(attempt.after != "launch" for attempt in self.attempts)

    @property
    def seconds_lost(self) -> float:
        """Seconds from the last progress to the next completed step, where training continued by itself."""
        total, lost_since = 0.0, None
        for previous, attempt in zip(self.attempts, self.attempts[1:], strict=False):
            if lost_since is None and attempt.after == "loss":
                lost_since = previous.ends[0].since or previous.ends[0].time
            if lost_since is not None and attempt.first_step_time is not None and attempt.after != "launch":
                total += max(0.0, attempt.first_step_time - lost_since)
            if attempt.first_step_time is not None or attempt.after == "launch":
                lost_since = None
        return total

    @property
    def ends(self) -> tuple[Event, ...]:
        """Ends of processes in the current attempt."""
        return self.early_ends if self.launched else self.attempts[-1].ends


@dataclass(frozen=True)
class ProcessEnd:
    """How processes of `host` ended too early."""

    host: str
    reason: str
    echo: bool = False
    passing: bool = True
    attempt: int = 0  # for which they were started; 0: unknown


@dataclass(frozen=True)
class Restart:
    """Training starts again from the newest checkpoint."""

    cause: str


@dataclass(frozen=True)
class GiveUp:
    """Training stays down: it would end in the same way, or has failed too often."""

    cause: str
    times: int  # failures without a new checkpoint since; 0: the cause is reason enough
    step: int  # of the checkpoint it started from


def restart_after(run: Path, end: ProcessEnd | None, allowed: int) -> Restart | GiveUp:
    """Record how processes ended, and decide whether training starts again.

    `end` is None where the process below has recorded it already. Training may fail `allowed` times in a row without
    a new checkpoint (`train.restarts`).
    """
    if end is not None:
        record_end(run, end)
    return decide(read_attempts(run), allowed)


def decide(log: AttemptLog, allowed: int) -> Restart | GiveUp:
    cause = first_cause(log.ends)
    if any(not end.passing for end in log.ends):
        return GiveUp(cause, 0, 0)
    restarts = restarts_without_progress(log)
    if restarts < allowed:
        return Restart(cause)
    return GiveUp(cause, restarts + 1, 0 if log.launched else log.attempts[-1].step)


def restarts_without_progress(log: AttemptLog) -> int:
    """Count the restarts since the last new checkpoint."""
    ends_per_host = max(Counter(end.host for end in log.ends).values(), default=0)
    if log.launched:
        return max(0, ends_per_host - 1)
    attempts = _attempts_from_same_checkpoint(log.attempts)
    restarts = sum(attempt.after == "loss" for attempt in attempts)
    # A checkpoint is recorded just before its final rename. Attempts that always die between the two make none.
    has_new_checkpoint = attempts[-1].has_checkpoint and not any(attempt.has_checkpoint for attempt in attempts[:-1])
    return (0 if has_new_checkpoint else restarts) + max(0, ends_per_host - 1)


def first_cause(ends: Sequence[Event]) -> str:
    """Return why an attempt ended: a permanent error first, then an independent end, then a consequence of one."""
    ranked = sorted(ends, key=lambda end: (end.passing, end.echo))  # stable: the first one recorded comes first
    return ranked[0].reason if ranked else "a machine was lost"


def describe_restart(log: AttemptLog, allowed: int) -> str:
    """Describe for a person why the current attempt started by itself; empty when a person started it."""
    attempt = log.attempts[-1]
    start = f"from the checkpoint of step {attempt.step}" if attempt.step else "from the beginning"
    machines = len(set(attempt.hosts))
    if len(log.attempts) < 2 or attempt.after == "launch":
        return ""
    previous = log.attempts[-2]
    left_hosts, joined_hosts = (
        sorted(set(a.hosts) - set(b.hosts)) for a, b in ((previous, attempt), (attempt, previous))
    )
    change = "".join([f"; {name} is gone" for name in left_hosts] + [f"; {name} has joined" for name in joined_hosts])
    if change:
        change += f", training goes on with {machines} machine{'s' if machines > 1 else ''}"
    if attempt.after == "change":
        unknown = "machines have joined or left" if machines > 1 else "the processes ended for a reason that is unknown"
        return f"{change.removeprefix('; ') or unknown}; starting again {start}"
    count = sum(attempt.after == "loss" for attempt in _attempts_from_same_checkpoint(log.attempts))
    # The advice after the first sentence is for when training stays down; "no. 3" does not end a sentence.
    cause = re.split(r"\. (?=[A-Z])", first_cause(previous.ends), maxsplit=1)[0]
    return f"{cause}{change}; starting again {start} ({count} of {allowed} without a new one)"


def _attempts_from_same_checkpoint(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the last attempts that started from the same checkpoint, since the last launch."""
    row: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.step != attempts[-1].step:
            break
        row.insert(0, attempt)
        if attempt.after == "launch":
            break
    return row


def record_event(run: Path, **values: Any) -> None:
    """Append one line to this machine's file with a single write, so that lines of several processes do not mix."""
    number = 1 + max((event.number for event in read_events(run)), default=0)
    line = Event(time=time.time(), number=number, **values).model_dump(exclude_defaults=True)
    path = run / _FOLDER / f"{socket.gethostname()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and not path.read_bytes().endswith(b"\n")  # the end of a line was lost
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, b"\n" * is_cut + json.dumps(line).encode() + b"\n")
    finally:
        os.close(handle)


def record_end(run: Path, end: ProcessEnd) -> None:
    """Add an end to the current attempt, or to an earlier one: a machine that was cut off notices an end late."""
    events = read_events(run)
    starts = [event for event in events if event.event == "start"]
    attempt = newest_attempt(events)
    if starts and end.host not in starts[-1].hosts:
        own = end.attempt or max((event.attempt for event in starts if end.host in event.hosts), default=attempt)
        attempt = min(attempt, own)
    since = _last_progress(run, max((event.time for event in starts), default=0.0))
    record_event(run, event="end", since=since, **asdict(replace(end, attempt=attempt)))


def _last_progress(run: Path, started: float) -> float:
    """Return when a process last reported progress in the attempt; 0 where none has reported."""
    moments = [0.0]
    for path in (run / POSITIONS).glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # lost with its machine, or damaged
            if (written := path.stat().st_mtime) > started:
                moments.append(written - json.loads(path.read_text())["still_seconds"])
    return max(moments)


def attempt_files(run: Path) -> list[Path]:
    return sorted((run / _FOLDER).glob("*.jsonl"))


def read_events(run: Path) -> list[Event]:
    """Read the complete lines of all machines in their order; a lost machine may have left half of one."""
    events = []
    for line in (line for path in attempt_files(run) for line in path.read_bytes().splitlines()):
        try:
            events.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return sorted(events, key=lambda event: (event.number, event.time if event.number else 0.0))


def read_attempts(run: Path) -> AttemptLog:
    return attempts_from(read_events(run))


def newest_attempt(events: Iterable[Event]) -> int:
    """Return the number of the current attempt; 0 before the first."""
    return max((event.attempt for event in events), default=0)


def attempts_from(events: Iterable[Event]) -> AttemptLog:
    log = AttemptLog()
    for event in events:
        log = _add_event(log, event)
    return log


def _add_event(log: AttemptLog, event: Event) -> AttemptLog:
    if event.event == "launch":
        return AttemptLog(log.attempts)
    if event.event == "start":
        after: Literal["launch", "loss", "change"] = (
            "launch" if log.launched else "loss" if log.attempts[-1].ends else "change"
        )
        attempt = Attempt(event.attempt, event.step, event.time, event.hosts, after)
        return AttemptLog((*log.attempts, attempt), launched=False)
    if log.launched:
        return replace(log, early_ends=(*log.early_ends, event)) if event.event == "end" else log
    if event.event == "end" and event.attempt < log.attempts[-1].number:
        return log
    *earlier, last = log.attempts
    return replace(log, attempts=(*earlier, _update_attempt(last, event)))


def _update_attempt(attempt: Attempt, event: Event) -> Attempt:
    if event.event == "step":
        return replace(attempt, first_step_time=attempt.first_step_time or event.time)
    if event.event == "checkpoint":
        return replace(attempt, has_checkpoint=True)
    return replace(attempt, ends=(*attempt.ends, event))
