"""Which kills `pipe chaos` makes: a pure function of how many, the seed, the steps and the processes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from pipeline.spec.chaos import Kill, Place

FEWEST_STEPS = 8  # of a training, so that a kill in its midst has a before and an after
ROOM_STEPS = 3  # that training may go on while a kill from outside is on its way

# What is dealt, again and again, until there are as many kills as were asked for.
DEALT = (
    "step", "write", "rename", "renamed", "ledger", "pipe", "other worker", "launcher", "step", "first worker",
    "start", "step", "write", "step", "step", "renamed", "step", "rename", "step", "step",
)  # fmt: skip
_PLACES: tuple[Place, ...] = ("start", "moment", "step", "ledger", "write", "rename", "renamed")  # as a step meets them


def schedule(kills: int, seed: int, steps: int, processes: int) -> tuple[Kill, ...]:
    """In the order they are made. Where there are as many kills at step ends as steps, every step's end has one."""
    dealt = [DEALT[i % len(DEALT)] for i in range(kills)]
    count, drawn = Counter(dealt), Counter[str]()
    random_numbers = random.Random(f"{kills} {seed} {steps} {processes}")
    found = []
    for kind in dealt:
        turn = drawn[kind]
        drawn[kind] += 1
        found.append(_kill(kind, turn, count[kind], steps, processes, random_numbers))
    return tuple(sorted(found, key=lambda kill: (kill.step, _PLACES.index(kill.place))))


def _kill(kind: str, turn: int, of: int, steps: int, processes: int, draw: random.Random) -> Kill:
    if kind == "step":
        return Kill(place="step", step=1 + (turn * steps + steps // 2) // of, rank=turn % processes)
    if kind == "start":
        return Kill(place="start", step=draw.randint(1, steps), share=draw.random())
    if kind in ("ledger", "write", "rename", "renamed"):
        place: Any = kind
        return Kill(place=place, step=draw.randint(1, steps), rank=draw.randrange(processes))
    step = draw.randint(1, max(1, steps - ROOM_STEPS))
    kill = Kill(place="moment", step=step, hold=step + ROOM_STEPS, share=draw.random())
    if kind in ("launcher", "pipe"):
        return kill.model_copy(update={"who": kind})
    rank = draw.randrange(1, processes) if kind == "other worker" and processes > 1 else 0
    return kill.model_copy(update={"rank": rank})


def step_ends(kills: int) -> int:
    """How many of so many kills stand at the end of a step."""
    return sum(DEALT[i % len(DEALT)] == "step" for i in range(kills))
