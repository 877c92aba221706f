"""Where one process stands among those that train or evaluate together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Rank:
        """As torchrun sets it; a process started alone is rank 0 of 1."""
        env = os.environ if env is None else env
        return cls(
            rank=int(env.get("RANK", "0")),
            local_rank=int(env.get("LOCAL_RANK", "0")),
            world_size=int(env.get("WORLD_SIZE", "1")),
        )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def slice_of(self, count: int) -> range:
        """This rank's contiguous share of `count` items; shares differ by one at most, together they are all."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)
