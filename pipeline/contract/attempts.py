"""The attempts that training took, as `logs/attempts.jsonl` tells them: from which step each began, and what ended it.

Whoever knows writes a line: the first training process, the agents that start processes, the node that watches them.

Whether training that lost a process begins again: one pure decision, the same for all who read the attempts.

What `pipe chaos` and the processes it kills tell each other: a schedule, and a record that outlives them all.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.contract.files import write_json
from pipeline.contract.settings.section import Frozen

ATTEMPTS_FILE = "logs/attempts.jsonl"


class Event(Frozen):
    """One line. `launch`: somebody had training begin or go on; `start`: all processes are there and go on from `step`;
    `step`: the first one is done; `checkpoint`: the first one is made; `end`: processes of `host` ended too early.
    """

    event: Literal["launch", "start", "step", "checkpoint", "end"]
    attempt: int
    time: float
    processes: int = 0
    hosts: tuple[str, ...] = ()  # of each rank
    step: int = 0
    reason: str = ""
    host: str = ""
    echo: bool = False  # they ended because others did
    passing: bool = True  # trying again may well succeed


@dataclass(frozen=True)
class Attempt:
    """What the lines of one attempt come to."""

    number: int
    step: int  # of the checkpoint it began from; 0: from the beginning
    started: float
    hosts: tuple[str, ...]
    after: Literal["launch", "loss", "change"]  # somebody, an attempt that failed, machines that come or go
    stepped: float | None = None  # when its first step was done
    kept: bool = False  # it made a checkpoint
    ends: tuple[Event, ...] = ()  # in the order they were told


@dataclass(frozen=True)
class Story:
    """All attempts, and the ends of processes since the last launch that came before there was one."""

    attempts: tuple[Attempt, ...] = ()
    early: tuple[Event, ...] = ()
    launched: bool = True  # no attempt has begun since

    @property
    def restarts(self) -> int:
        """How often training began again by itself."""
        return sum(attempt.after != "launch" for attempt in self.attempts)

    @property
    def seconds_lost(self) -> float:
        """From the end of an attempt to the next step that was made, where training went on by itself."""
        total, since = 0.0, None
        for earlier, later in zip(self.attempts, self.attempts[1:], strict=False):
            if since is None and later.after == "loss":
                since = earlier.ends[0].time
            if since is not None and later.stepped is not None and later.after != "launch":
                total += max(0.0, later.stepped - since)
            if later.stepped is not None or later.after == "launch":
                since = None
        return total

    @property
    def ends(self) -> tuple[Event, ...]:
        """Of the attempt under way."""
        return self.early if self.launched else self.attempts[-1].ends


def tell(run: Path, **values: Any) -> None:
    """One write of one line: of several that tell something, none tears another's."""
    line = Event(time=time.time(), **values).model_dump(exclude_defaults=True)
    path = run / ATTEMPTS_FILE
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, json.dumps(line).encode() + b"\n")
    finally:
        os.close(handle)


def tell_end(run: Path, **values: Any) -> None:
    """Of the attempt under way, or before there is one."""
    tell(run, event="end", attempt=newest(read_events(run)), **values)


def read_events(run: Path) -> list[Event]:
    """Whole lines; a machine that was lost may have left half of one."""
    path = run / ATTEMPTS_FILE
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(Event.model_validate_json(line))
        except ValidationError:
            continue
    return found


def newest(events: Iterable[Event]) -> int:
    """The number of the attempt under way."""
    return max((event.attempt for event in events), default=0)


def read_story(run: Path) -> Story:
    return story(read_events(run))


def story(events: Sequence[Event]) -> Story:
    found = Story()
    for event in events:
        found = _with(found, event)
    return found


def _with(found: Story, event: Event) -> Story:
    if event.event == "launch":
        return Story(found.attempts)
    if event.event == "start":
        after: Literal["launch", "loss", "change"] = (
            "launch" if found.launched else "loss" if found.attempts[-1].ends else "change"
        )
        attempt = Attempt(event.attempt, event.step, event.time, event.hosts, after)
        return Story((*found.attempts, attempt), launched=False)
    if found.launched:
        return replace(found, early=(*found.early, event)) if event.event == "end" else found
    *earlier, last = found.attempts
    return replace(found, attempts=(*earlier, _told(last, event)))


def _told(attempt: Attempt, event: Event) -> Attempt:
    if event.event == "step":
        return replace(attempt, stepped=attempt.stepped or event.time)
    if event.event == "checkpoint":
        return replace(attempt, kept=True)
    return replace(attempt, ends=(*attempt.ends, event))


@dataclass(frozen=True)
class Again:
    """It does, from the newest checkpoint."""

    cause: str


@dataclass(frozen=True)
class Stop:
    """It does not: it would end as it did, or did so too often."""

    cause: str
    times: int  # lost without a new checkpoint since; 0: the cause is reason enough
    step: int  # of the checkpoint it began from


def decide(story: Story, allowed: int) -> Again | Stop:
    """After processes ended: at most `allowed` times in a row from the same checkpoint."""
    cause = cause_of(story.ends)
    if any(not end.passing for end in story.ends):
        return Stop(cause, 0, 0)
    began = 0 if story.launched else story.attempts[-1].step
    made = used(story)
    return Again(cause) if made < allowed else Stop(cause, made + 1, began)


def used(story: Story) -> int:
    """How often training began again without a new checkpoint since."""
    ended = max(Counter(end.host for end in story.ends).values(), default=0)
    if story.launched:
        return max(0, ended - 1)
    row = _row(story.attempts)
    again = sum(attempt.after == "loss" for attempt in row)
    # A checkpoint is told just before it has its name. Who is always killed between the two makes none.
    fresh = row[-1].kept and not any(attempt.kept for attempt in row[:-1])
    return (0 if fresh else again) + max(0, ended - 1)


def cause_of(ends: Sequence[Event]) -> str:
    """Why an attempt ended: what stops training, else what ended by itself, else what followed from it."""
    ranked = sorted(ends, key=lambda end: (end.passing, end.echo))  # stable: the first one told comes first
    return ranked[0].reason if ranked else "a machine was lost"


def told(story: Story, allowed: int) -> str:
    """What a person is told when an attempt has begun by itself."""
    attempt = story.attempts[-1]
    place = f"from the checkpoint of step {attempt.step}" if attempt.step else "from the beginning"
    machines = len(set(attempt.hosts))
    if len(story.attempts) < 2 or attempt.after == "launch":
        return ""
    before = story.attempts[-2]
    gone, come = (sorted(set(a.hosts) - set(b.hosts)) for a, b in ((before, attempt), (attempt, before)))
    change = "".join([f"; {name} is gone" for name in gone] + [f"; {name} has joined" for name in come])
    if change:
        change += f", training goes on with {machines} machine{'s' if machines > 1 else ''}"
    if attempt.after == "change":
        return f"{change.removeprefix('; ') or 'machines have come or gone'}; starting again {place}"
    count = sum(one.after == "loss" for one in _row(story.attempts))
    cause = cause_of(before.ends).partition(". ")[0]  # what follows is for whom it ends
    return f"{cause}{change}; starting again {place} ({count} of {allowed} without a new one)"


def _row(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The last ones that began from the same checkpoint, since the last launch."""
    row: list[Attempt] = []
    for attempt in reversed(attempts):
        if attempt.step != attempts[-1].step:
            break
        row.insert(0, attempt)
        if attempt.after == "launch":
            break
    return row


CHAOS_VARIABLE = "PIPE_CHAOS"  # names the folder

Place = Literal["start", "moment", "step", "ledger", "write", "rename", "renamed"]


class Kill(Frozen):
    """One kill -9. It is due when the kills before it were made, and training has come to `step` since then."""

    place: Place  # `start` and `moment` are any place: whoever watches from outside kills there
    step: int  # steps that are done by then, at least
    who: Literal["worker", "launcher", "pipe"] = "worker"
    rank: int = 0  # of the worker
    share: float = 0.0  # of the time there is for it, when it comes from outside
    hold: int = 0  # a kill from outside: training goes no further than this step before it


class ChaosEvent(Frozen):
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

    def tell(self, event: ChaosEvent) -> None:
        """One write, synced: the writer may be gone the moment after."""
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

    def _claim(self, number: int) -> Path:
        return self.folder / f"kill-{number}"


def now() -> float:
    """One clock for all processes of a machine."""
    return time.time()
