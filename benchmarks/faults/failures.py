"""Failures that come as they do: at random times, whatever training is doing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.chaos.campaign import DueKill, NextKill, kill_events, no_kill
from pipeline.contract.chaos import ChaosEvent, Kill

Victim = Literal["worker", "launcher", "pipe"]


def failures(every_seconds: float, victim: Victim, processes: int, seed: int) -> NextKill:
    """Return the next kill, from the first step on, rotating over the workers; an interval of 0 means no kills."""
    if not every_seconds:
        return no_kill

    def due(events: Sequence[ChaosEvent], _began: float) -> DueKill:
        kills = kill_events(events)
        last_kill_time = kills[-1].time if kills else 0.0
        recovery_time = next(
            (event.time for event in events if event.event == "step" and event.born > last_kill_time), None
        )
        if recovery_time is None:  # the next failure waits for a training that it can hit
            return None
        gap = next(itertools.islice(gaps(every_seconds, seed), len(kills), None))
        rank = len(kills) % processes if victim == "worker" else 0
        return (last_kill_time or recovery_time) + gap, Kill(place="moment", step=0, who=victim, rank=rank)

    return due


def gaps(every_seconds: float, seed: int) -> Iterator[float]:
    """Yield gaps between 0.5 and 1.5 times the mean."""
    draw = random.Random(f"{every_seconds} {seed}")
    while True:
        yield every_seconds * (0.5 + draw.random())
