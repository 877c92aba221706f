"""Whether training that lost a process begins again: one pure decision, the same for all who read the attempts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.spec.attempts import Attempt, Event, Story


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
