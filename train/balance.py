"""How a global batch is cut into slices: equal ones, or as large as each process is fast."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from train.group import Group
from train.strategy import Alone

_EVERY = 10  # steps between two looks at the speeds
_MEMORY = 0.5  # how much of the earlier estimate stays


class Balance:
    """Gradients are weighted by slice size, so they are exact however the batch is cut."""

    def __init__(self, kind: Literal["equal", "auto"], group: Group, strategy: Alone) -> None:
        self._group, self._auto = group, kind == "auto" and group.data_size > 1
        self._strategy = strategy
        self.speeds = [1.0] * group.data_size  # samples per second, on any common scale
        self._samples = self._steps = 0
        self._seconds_before = 0.0

    def slice_of(self, count: int) -> range:
        """This process's share of a global batch of `count` samples."""
        return cut(count, self.speeds)[self._group.data_rank] if self._auto else self._group.slice_of(count)

    def slices(self, count: int) -> dict[int, range]:
        """The same by its number; a process may have several, each worked through by itself."""
        return {self._group.data_rank: self.slice_of(count)} if self._auto else self._strategy.slices(count)

    def observe(self, count: int) -> None:
        """A step with a global batch of `count` samples is done; every few steps all tell how fast they were."""
        if not self._auto:
            return
        if self._steps == 0:
            self._own_seconds()  # whatever warming up and the first step took
        else:
            self._samples += len(self.slice_of(count))
        if self._steps and self._steps % _EVERY == 0:
            found = self._group.gather(self._samples / max(self._own_seconds(), 1e-9))
            old = self.speeds if self._steps > _EVERY else found
            self.speeds = [_MEMORY * before + (1 - _MEMORY) * now for before, now in zip(old, found, strict=True)]
            self._samples = 0
        self._steps += 1

    def told(self) -> dict[str, dict[str, float]]:
        """For the journal: each process's share of the batch; nothing where they are equal by definition."""
        if not self._auto:
            return {}
        return {"batch_share": {f"rank {rank}": speed / sum(self.speeds) for rank, speed in enumerate(self.speeds)}}

    def _own_seconds(self) -> float:
        """What this process worked since the last look, without waiting for the others."""
        self._strategy.stopwatch.collect()
        now, before = self._strategy.traffic.own_seconds, self._seconds_before
        self._seconds_before = now
        return now - before


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
