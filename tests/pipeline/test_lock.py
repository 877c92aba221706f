from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.lock import locked, take, waited
from pipeline.spec.errors import ResourceError
from pipeline.spec.sources import HOUSE

HOLDER = """
import sys, time
from pathlib import Path
from pipeline.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    process = subprocess.Popen(command, cwd=HOUSE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_process_is_told_who_holds_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ResourceError, match=rf"\(pid {holder.pid} on .*\) is working here"), locked(tmp_path):
        pass


def test_a_killed_owner_leaves_no_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait(timeout=10)
    with locked(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / ".lock").read_text()


def test_it_is_free_again_afterwards_even_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        _ = 1 / 0
    with locked(tmp_path):
        pass


def test_the_folder_is_made_when_it_is_missing(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "runs"):
        assert (tmp_path / "new" / "runs").is_dir()


def test_an_owner_caught_while_it_writes_its_name_is_refused_all_the_same(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    (tmp_path / ".lock").write_text("")
    with pytest.raises(ResourceError, match="another `pipe` is working here"), locked(tmp_path):
        pass


def test_those_who_share_it_keep_out_those_who_do_not(tmp_path: Path) -> None:
    taken = pytest.raises(ResourceError, match=rf"\(pid {os.getpid()} on .*\) is working here")
    with locked(tmp_path, shared=True), locked(tmp_path, shared=True), taken, locked(tmp_path):
        pass
    with locked(tmp_path), pytest.raises(ResourceError, match="is working here"), locked(tmp_path, shared=True):
        pass


def test_one_who_is_told_waits_until_it_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        holder.kill()

    with locked(tmp_path, told=tell):
        assert holder.wait(timeout=10) == -9
    assert len(told) == 1
    assert f"(pid {holder.pid} on " in told[0]


def test_a_name_that_is_no_longer_true_does_not_stay(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text()
    assert (tmp_path / ".lock").read_text() == ""


def test_a_single_lock_is_taken_or_not(tmp_path: Path) -> None:
    held = take(tmp_path / "one")
    assert held is not None
    assert take(tmp_path / "one") is None
    held.release()
    again = take(tmp_path / "one")
    assert again is not None
    again.release()


def test_work_of_a_moment_is_done_one_after_another(tmp_path: Path) -> None:
    with waited(tmp_path / "one"):
        assert take(tmp_path / "one") is None
    held = take(tmp_path / "one")
    assert held is not None
    held.release()
