"""A machine whose clock is wrong: Python there is told so before anything else is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# `datetime.now` asks the kernel itself, hence its own words; timers (time.monotonic) are not the clock's.
_SHIFT = """
import datetime
import time

kernel = time.time
time.time = lambda: kernel() + {seconds}


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)


datetime.datetime = Shifted
"""


def shifted(folder: Path, seconds: float) -> Mapping[str, str]:
    """The environment of a machine that is `seconds` ahead of the others."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SHIFT.format(seconds=seconds))
    return {"PYTHONPATH": str(folder)}
