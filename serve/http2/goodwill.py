"""Frames that cost a client nothing and us a little: a connection that is useful may send many, others may not."""

from __future__ import annotations

import time

_MOST = 2000
_PER_SECOND = 500
_EARNED = 8  # for each answer: a call goes along with a few of them


class Goodwill:
    __slots__ = ("_left", "_since")

    def __init__(self) -> None:
        self._left, self._since = _MOST, time.monotonic()

    def spend(self, cost: int) -> bool:
        """For one such frame, or as many; False where it is used up."""
        self._left -= cost
        if self._left < 0:
            now = time.monotonic()
            self._left += min(_MOST, int((now - self._since) * _PER_SECOND))
            self._since = now
        return self._left >= 0

    def earn(self, worth: bool = True) -> None:
        if worth and self._left < _MOST:
            self._left += _EARNED
