"""Python's garbage collector in the service."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from serve.__main__ import tune_garbage_collector
gc.disable()
tune_garbage_collector()
waiting = 1024 * 30  # objects of requests that fill the queue; they go without being looked through
print(gc.isenabled(), gc.get_freeze_count() > 10_000, gc.get_threshold()[0] > waiting)
"""


def test_startup_objects_and_a_full_queue_are_not_traversed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True", "True", "True"]
