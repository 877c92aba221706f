from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

from pipeline.spec.sources import HOUSE
from pipeline.tune.journal import KernelLock, cut_half_line, open_journal

HOLDER = """
import sys, time
from pathlib import Path
from pipeline.tune.journal import KernelLock
KernelLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def new_study(path: Path) -> optuna.Study:
    return optuna.create_study(storage=open_journal(path), study_name="one", load_if_exists=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"one\n", b"one\n"), (b"one\ntw", b"one\n"), (b"on", b""), (b"one\n\n", b"one\n\n")],
)
def test_only_a_line_without_an_end_is_cut_off(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "file").write_bytes(before)
    cut_half_line(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == after


def test_half_a_line_of_a_killed_writer_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    study.tell(study.ask().number, 1.0)
    with path.open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    again = new_study(path)
    again.tell(again.ask().number, 2.0)
    assert [trial.value for trial in new_study(path).trials] == [1.0, 2.0]


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    study = new_study(path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    started = time.monotonic()
    study.ask()
    assert time.monotonic() - started < 10, "Optuna's own locks are waited for 30 s"


def test_a_lock_can_be_taken_again(tmp_path: Path) -> None:
    (tmp_path / "journal.log").touch()
    lock = KernelLock(tmp_path / "journal.log")
    for _ in range(2):
        assert lock.acquire()
        lock.release()
