from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pipeline.failures import KilledProcess, find_killed_process

TORCHRUN = """
============================================================
train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : node0
  rank      : 0 (local_rank: 0)
  exitcode  : {first} (pid: 40)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:01
  host      : node1
  rank      : 3 (local_rank: 1)
  exitcode  : {cause} (pid: 41)  (SIGKILL)
  error_file: <N/A>
============================================================
"""


def test_killed_process_is_found_among_consequent_failures() -> None:
    assert find_killed_process(TORCHRUN.format(first="-9", cause="1")) == KilledProcess(0, "node0", signal.SIGKILL)
    assert find_killed_process(TORCHRUN.format(first="-9", cause="-6")) == KilledProcess(0, "node0", signal.SIGKILL)
    assert find_killed_process(TORCHRUN.format(first="1", cause="-6")) == KilledProcess(3, "node1", signal.SIGABRT)


SRUN = "srun: error: node7: task 5: {}\n"
MPIRUN = (
    "noise\nmpirun noticed that process rank 1 with PID 0 on node node1 exited on signal 11 (Segmentation fault).\n"
)
HOROVODRUN = "Process 0 exit with status code 1.\nTerminating remaining workers.\nProcess 1 exit with status code {}.\n"


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (TORCHRUN.format(first="-15", cause="-9"), KilledProcess(3, "node1", signal.SIGKILL)),
        (TORCHRUN.format(first="-15", cause="2"), None),
        (MPIRUN, KilledProcess(1, "node1", signal.SIGSEGV)),
        (SRUN.format("Killed"), KilledProcess(5, "node7", signal.SIGKILL)),
        (SRUN.format("Segmentation fault (core dumped)"), KilledProcess(5, "node7", signal.SIGSEGV)),
        (SRUN.format("Exited with exit code 1"), None),
        (HOROVODRUN.format(137), KilledProcess(1, "localhost", signal.SIGKILL)),
        (HOROVODRUN.format(143), None),  # ended by horovodrun itself
        ("", None),
    ],
)
def test_killed_process_is_found_in_the_log_of_each_launcher(log: str, found: KilledProcess | None) -> None:
    assert find_killed_process(log) == found


def test_killed_process_is_described_by_rank_host_and_signal() -> None:
    assert str(KilledProcess(1, "node1", 9)).startswith(
        "rank 1 on node1 was killed (SIGKILL), by hand or by the kernel"
    )
    assert "rank 0 on node1 was ended by SIGSEGV" in str(KilledProcess(0, "node1", 11))
    assert "signal 99" in str(KilledProcess(0, "node1", 99))


def test_table_of_the_installed_torchrun_is_parsed() -> None:
    program = (
        "import os, signal, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    found = find_killed_process(done.stderr)
    assert found is not None
    assert (found.rank, found.signal) == (1, signal.SIGKILL)
