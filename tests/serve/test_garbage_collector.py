"""The collector's share of the service."""

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


def test_what_is_loaded_at_the_start_is_never_looked_through_again_nor_a_full_queue() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == ["True", "True", "True"]
