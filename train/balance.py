"""How a global batch is cut into slices: equal ones, or as large as each process is fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from train.group import Group

_EVERY = 10  # steps between two looks at the speeds
_MEMORY = 0.5  # how much of the earlier estimate stays


class Balance:
    """Gradients are weighted by slice size, so they are exact however the batch is cut."""

    def __init__(self, kind: Literal["equal", "auto"], group: Group) -> None:
        self._group, self._auto = group, kind == "auto" and group.data_size > 1
        self.speeds = [1.0] * group.data_size  # samples per second, on any common scale
        self._samples = self._seconds = 0.0
        self._steps = 0

    def slice_of(self, count: int) -> range:
        """This process's share of a global batch of `count` samples."""
        return cut(count, self.speeds)[self._group.data_rank] if self._auto else self._group.slice_of(count)

    def observe(self, samples: int, seconds: float) -> None:
        """What this process did of a step by itself, and how long it took; collective every few steps."""
        if not self._auto:
            return
        self._samples, self._seconds, self._steps = self._samples + samples, self._seconds + seconds, self._steps + 1
        if self._steps % _EVERY == 0:
            found = self._group.gather(self._samples / max(self._seconds, 1e-9))
            old = self.speeds if self._steps > _EVERY else found
            self.speeds = [_MEMORY * before + (1 - _MEMORY) * now for before, now in zip(old, found, strict=True)]
            self._samples = self._seconds = 0.0


def cut(count: int, speeds: Sequence[float]) -> list[range]:
    """Consecutive slices in proportion to the speeds; none is empty while there is a sample for each."""
    total, least = sum(speeds), 1 if count >= len(speeds) else 0
    spare = count - least * len(speeds)
    bounds, passed = [0], 0.0
    for i, speed in enumerate(speeds, start=1):
        passed += speed
        bounds.append(least * i + int(spare * (passed / total) + 1e-9))
    bounds[-1] = count
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
