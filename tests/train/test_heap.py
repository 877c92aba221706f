from __future__ import annotations

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from train.heap import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)

def step():
    blocks = [torch.ones(300_000) for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = step()
for _ in range(20):
    after = step()
print((after - before) // 20)
"""


def faults(mode: str) -> int:
    """Pages the kernel hands out for one step of 24 MB, all freed after it.

    Whether glibc gives such memory back depends on what else lies in the heap; told so, it always does.
    """
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    argv = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 3:
        pytest.skip("the C library cannot be told to keep freed memory")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_memory_of_one_step_serves_the_next_without_asking_the_kernel() -> None:
    assert faults("keep") < 100 < faults("default")
