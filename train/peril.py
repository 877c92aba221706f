"""The places where `pipe chaos` kills a training process; outside of it, passing one costs a look at a global."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Place = Literal["step", "ledger", "write", "rename", "renamed"]

_armed: Callable[[Place], None] | None = None


def reached(place: Place) -> None:
    """This process is about to go on from `place`, or never will."""
    if _armed is not None:
        _armed(place)


def arm(trap: Callable[[Place], None] | None) -> None:
    """`trap` is called at every place from here on."""
    global _armed
    _armed = trap
