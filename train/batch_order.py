"""The order of samples: which ones form each global batch, as a pure function of (seed, epoch, step)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class BatchOrder:
    """Every epoch is one permutation, cut into batches whose sizes differ by one at most.

    It does not depend on the number of processes.
    """

    samples: int
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def smallest_batch(self) -> int:
        return self.samples // self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> Indices:
        """Return the sample indices of one global step, counted from 0 over all epochs."""
        start, stop = self._bounds(step)
        return _permutation(self.samples, self.seed, self.epoch_of(step))[start:stop]

    def size(self, step: int) -> int:
        start, stop = self._bounds(step)
        return stop - start

    def _bounds(self, step: int) -> tuple[int, int]:
        offset, steps = step % self.steps_per_epoch, self.steps_per_epoch
        return self.samples * offset // steps, self.samples * (offset + 1) // steps


@lru_cache(maxsize=2)
def _permutation(samples: int, seed: int, epoch: int) -> Indices:
    # Philox is specified to the bit, so the order is the same on every platform.
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)
