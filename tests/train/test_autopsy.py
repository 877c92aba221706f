from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from train.autopsy import Tripwire, kernel_state, process_start, put_down, stacks, why_silent


@pytest.fixture
def sleeper() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL) as process:
        yield process
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_the_stacks_of_a_process_are_those_of_all_threads_but_the_asking_one() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(stacks()), name="asker")
    thread.start()
    thread.join()
    assert found[0].startswith("thread MainThread, innermost call last:\n")
    assert "test_the_stacks_of_a_process" in found[0]
    assert "asker" not in found[0]


def test_a_tripwire_writes_the_stacks_when_nobody_rearms_it(tmp_path: Path) -> None:
    path = tmp_path / "frozen"
    wire = Tripwire(path, 0.3)
    for _ in range(3):
        wire.rearm()
        time.sleep(0.05)
    assert path.read_text() == ""
    end = time.monotonic() + 20
    while not path.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "test_a_tripwire_writes_the_stacks" in path.read_text()
    wire.rearm()
    assert path.read_text() == "", "it has gone on since"
    wire.remove()
    assert not path.exists()


def test_a_stopped_process_is_told_as_such(sleeper: psutil.Popen) -> None:
    started = sleeper.create_time()
    for text in ("its interpreter is blocked in native code", "it is stopped (SIGSTOP)"):
        end = time.monotonic() + 20
        while why_silent(sleeper.pid, started) != text:  # at its start it may wait for the disk
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(sleeper.pid, signal.SIGSTOP)
    assert kernel_state(sleeper.pid).startswith("T (stopped), in ")


def test_a_process_is_put_down_only_where_it_is_the_very_one(sleeper: psutil.Popen) -> None:
    put_down(sleeper.pid, sleeper.create_time() - 60)
    assert sleeper.is_running()
    assert why_silent(sleeper.pid, sleeper.create_time() - 60) == "it has ended"
    put_down(sleeper.pid, sleeper.create_time())
    assert sleeper.wait(timeout=20) == -signal.SIGKILL
    put_down(sleeper.pid, 0.0)  # and is no error where it is gone


def test_the_start_of_this_process_is_what_others_see_of_it() -> None:
    assert abs(process_start() - psutil.Process(os.getpid()).create_time()) < 1
