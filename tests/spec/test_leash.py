from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.spec import leash

# Says when it holds the leash, then works until it is told to stop through another pipe.
PROGRAM = "import os, sys; from pipeline.spec import leash; leash.hold(); print('held', flush=True); os.read({stop}, 1)"


@contextmanager
def leashed(env: dict[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A process, the end of the leash the runner holds, and the pipe that ends its work."""
    read_end, write_end = os.pipe()
    stop_read, stop_write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(stop=stop_read)],
        stdin=read_end,
        stdout=subprocess.PIPE,
        pass_fds=[stop_read],
        env={**{k: v for k, v in os.environ.items() if k != leash.VARIABLE}, **env},
    )
    os.close(read_end)
    os.close(stop_read)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    try:
        yield process, write_end, stop_write
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(stop_write)


def test_a_process_goes_when_the_runner_is_gone() -> None:
    with leashed({leash.VARIABLE: "1"}) as (process, write_end, _):
        assert process.poll() is None
        os.close(write_end)
        assert process.wait(timeout=10) == leash.EXIT_CODE


def test_bytes_on_the_leash_do_not_end_the_process() -> None:
    with leashed({leash.VARIABLE: "1"}) as (process, write_end, stop):
        os.write(write_end, b"hello")
        os.write(stop, b"x")
        assert process.wait(timeout=10) == 0
        os.close(write_end)


def test_a_process_that_its_launcher_gave_the_null_device_is_not_on_the_leash() -> None:
    """Its end-of-file says nothing of the runner: mpirun hands the leash to its first process alone."""
    env = {**os.environ, leash.VARIABLE: "1"}
    program = "import threading; from pipeline.spec import leash; leash.hold(); print(threading.active_count())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True
    )
    assert done.stdout == b"1\n"


def test_a_process_that_nobody_leashed_works_on_without_standard_input() -> None:
    with leashed({}) as (process, write_end, stop):
        os.close(write_end)
        os.write(stop, b"x")
        assert process.wait(timeout=10) == 0
