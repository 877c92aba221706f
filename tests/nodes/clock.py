"""Shift the clock of one machine: Python there gets another time before anything else is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# `datetime.now` calls the kernel itself, and its class can be no other, for another machine unpickles what it makes. So
# the word is put into the class, past its lock. Timers (time.monotonic) are not the clock's.
_SHIFT = """
import ctypes
import datetime
import gc
import time

kernel = time.time
time.time = lambda: kernel() + {seconds}
(words,) = gc.get_referents(datetime.datetime.__dict__)
words["now"] = classmethod(lambda cls, tz=None: cls.fromtimestamp(time.time(), tz))
ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
"""


def shifted(folder: Path, seconds: float) -> Mapping[str, str]:
    """The environment of a machine that is `seconds` ahead of the others."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SHIFT.format(seconds=seconds))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
