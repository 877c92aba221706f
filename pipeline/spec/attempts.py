"""The attempts that training took, as `logs/attempts.jsonl` tells them: from which step each began, and what ended it.

Whoever knows writes a line: the first training process, the agents that start processes, the node that watches them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.spec.frozen import Frozen

FILE = "logs/attempts.jsonl"


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
    path = run / FILE
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
    path = run / FILE
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
