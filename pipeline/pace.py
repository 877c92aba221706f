"""How fast training comes along, and how long it will still take."""

from __future__ import annotations

from collections import deque

_WINDOW_SECONDS = 120.0  # long enough to hold validations and checkpoints, short enough to notice a change


class Pace:
    """Looks at steps as they are done, whatever they were spent on."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def saw(self, step: int, now: float) -> None:
        if self._seen and step <= self._seen[-1][1]:
            return
        self._seen.append((now, step))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW_SECONDS and len(self._seen) > 2:
            self._seen.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Nothing until two different steps were seen."""
        if len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (total - last) * (ended - began) / (last - first)


def clock(seconds: float) -> str:
    """As 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
