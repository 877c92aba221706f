"""Shift the clock of one machine: Python there gets another time before anything else is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# `datetime.now` does not use time.time, and a subclass of datetime could not be unpickled on other machines. So the
# method is replaced in the built-in class. Timers (time.monotonic) do not depend on the clock.
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
    """Return the environment of a machine that is `seconds` ahead of the others."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SHIFT.format(seconds=seconds))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
