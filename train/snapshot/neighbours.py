"""Which processes share a machine, and who keeps a copy of whose part on another one."""

from __future__ import annotations

from collections.abc import Sequence


class Neighbours:
    """`machines` has the name of every process's machine, by rank."""

    def __init__(self, machines: Sequence[str], rank: int) -> None:
        self._machines, self._rank = list(machines), rank
        self._order = list(dict.fromkeys(machines))

    @property
    def here(self) -> list[int]:
        """The processes of this machine."""
        return self._of(self._machines[self._rank])

    @property
    def leads(self) -> bool:
        """Whether this process does what is done once on its machine."""
        return self._rank == self.here[0]

    @property
    def leaders(self) -> list[int]:
        return [self._of(machine)[0] for machine in self._order]

    def keeper(self, rank: int) -> int | None:
        """A process of the next machine; where there is one machine alone its memory must do."""
        if len(self._order) == 1:
            return None
        machine = self._machines[rank]
        others = self._of(self._order[(self._order.index(machine) + 1) % len(self._order)])
        return others[self._of(machine).index(rank) % len(others)]

    @property
    def wards(self) -> list[int]:
        """Those whose part this process keeps beside its own."""
        return [rank for rank in range(len(self._machines)) if self.keeper(rank) == self._rank]

    def _of(self, machine: str) -> list[int]:
        return [rank for rank, name in enumerate(self._machines) if name == machine]
