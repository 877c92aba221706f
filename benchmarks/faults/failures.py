"""Failures that come as they do: at random times, whatever training is doing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Literal

from pipeline.chaos.campaign import DueKill, NextKill, kill_events, no_kill
from train.chaos_hooks import ChaosEvent, Kill

Victim = Literal["worker", "launcher", "pipe"]


def failures(every_seconds: float, victim: Victim, processes: int, seed: int) -> NextKill:
    """From the first step on; of workers each in turn. Without a time between them there are none."""
    if not every_seconds:
        return no_kill

    def due(events: Sequence[ChaosEvent], _began: float) -> DueKill:
        made = kill_events(events)
        since = made[-1].time if made else 0.0
        back = next((event.time for event in events if event.event == "step" and event.born > since), None)
        if back is None:  # the next failure waits for a training that it can hit
            return None
        gap = next(itertools.islice(gaps(every_seconds, seed), len(made), None))
        rank = len(made) % processes if victim == "worker" else 0
        return (since or back) + gap, Kill(place="moment", step=0, who=victim, rank=rank)

    return due


def gaps(every_seconds: float, seed: int) -> Iterator[float]:
    """Between half and one and a half of the mean."""
    draw = random.Random(f"{every_seconds} {seed}")
    while True:
        yield every_seconds * (0.5 + draw.random())
