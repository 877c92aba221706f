"""What is said of every kill while training is under attack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.chaos.attack import kills_of
from pipeline.chaos.verdict import Made, made
from pipeline.spec.chaos import Event, Kill

Say = Callable[[str], None]


class Teller:
    """A line for each kill, when it is known how long training took to come back."""

    def __init__(self, kills: Sequence[Kill], before: int, total: int, say: Say) -> None:
        self._kills, self._before, self._total, self._say = kills, before, total, say
        self._told = 0

    def __call__(self, events: Sequence[Event]) -> None:
        found = list(made(self._kills, events, None))
        count = len(kills_of(events))
        while self._told < count and (found[self._told].seconds is not None or self._told + 1 < count):
            self._say(line(found[self._told], self._before + self._told + 1, self._total))
            self._told += 1


def line(one: Made, number: int, total: int) -> str:
    back = "the next kill came first" if one.seconds is None else f"next step after {one.seconds:.1f} s"
    return f"kill {number} of {total}: {one.place}, from step {one.step} on: {back}"
