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

MPIRUN = "mpirun noticed that process rank 1 with PID 0 on node node1 exited on signal 11 (Segmentation fault)."


def test_torchruns_table_names_the_killed_process_and_not_those_it_ended_itself() -> None:
    assert find_killed_process(TORCHRUN.format(first="-15", cause="-9")) == KilledProcess(3, "node1", signal.SIGKILL)


def test_a_process_that_failed_because_another_was_killed_is_not_the_one() -> None:
    assert find_killed_process(TORCHRUN.format(first="-9", cause="1")) == KilledProcess(0, "node0", signal.SIGKILL)
    assert find_killed_process(TORCHRUN.format(first="-9", cause="-6")) == KilledProcess(0, "node0", signal.SIGKILL)
    assert find_killed_process(TORCHRUN.format(first="1", cause="-6")) == KilledProcess(3, "node1", signal.SIGABRT)


def test_processes_that_only_failed_were_not_killed() -> None:
    assert find_killed_process(TORCHRUN.format(first="-15", cause="2")) is None
    assert find_killed_process("") is None


def test_mpirun_names_it_in_a_sentence() -> None:
    assert find_killed_process(f"noise\n{MPIRUN}\n") == KilledProcess(1, "node1", signal.SIGSEGV)


@pytest.mark.parametrize(("description", "number"), [("Killed", 9), ("Segmentation fault (core dumped)", 11)])
def test_srun_names_it_by_what_the_signal_means(description: str, number: int) -> None:
    assert find_killed_process(f"srun: error: node7: task 5: {description}\n") == KilledProcess(5, "node7", number)
    assert find_killed_process("srun: error: node7: task 5: Exited with exit code 1\n") is None


def test_horovodrun_names_it_by_a_shells_status() -> None:
    log = "Process 0 exit with status code 1.\nTerminating remaining workers.\nProcess 1 exit with status code {}.\n"
    assert find_killed_process(log.format(137)) == KilledProcess(1, "localhost", signal.SIGKILL)
    assert find_killed_process(log.format(143)) is None, "it ended that one itself"


def test_killed_process_is_described_by_rank_host_and_signal() -> None:
    assert str(KilledProcess(1, "node1", 9)).startswith(
        "rank 1 on node1 was killed (SIGKILL), by hand or by the kernel"
    )
    assert "rank 0 on node1 was ended by SIGSEGV" in str(KilledProcess(0, "node1", 11))
    assert "signal 99" in str(KilledProcess(0, "node1", 99))


def test_the_installed_torchrun_still_writes_such_a_table() -> None:
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
