"""How long training stood still for its checkpoints; they are written while it goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Pauses:
    """Of this process."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0  # since the start
        self._line: list[float] = []  # since the last line of the journal

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        pause = time.perf_counter() - started
        self.count, self.seconds = self.count + 1, self.seconds + pause
        self._line.append(pause)

    def told(self) -> dict[str, float]:
        """For the journal: the mean since its last line; nothing when there was none."""
        line, self._line = self._line, []
        return {"checkpoint_seconds": sum(line) / len(line)} if line else {}
