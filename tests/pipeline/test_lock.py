from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.lock import locked
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
