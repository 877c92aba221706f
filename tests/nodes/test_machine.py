"""The machines that the other tests break are machines: what happens on one does not happen on another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.network import network

from ..e2e.project_folder import wait_for
from .clock import shifted
from .machine import Machine


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Machine, ...]]:
    with network(2) as hosts:
        machines = tuple(Machine(host) for host in hosts)
        try:
            for machine in machines:
                machine.boot()
            yield machines
        finally:
            for machine in machines:
                machine.lose()


def run_python(machine: Machine, program: str, folder: Path, **env: str) -> str:
    path = folder / f"{machine.name}.txt"
    with path.open("wb") as output:
        door = machine.start([sys.executable, "-c", program], folder, {**os.environ, **env}, output)
        assert door.wait(timeout=300) == 0, path.read_text()
    return path.read_text().strip()


def test_a_lost_machine_takes_all_its_processes_along_and_boots_again(
    pair: tuple[Machine, ...], tmp_path: Path
) -> None:
    lost, other = pair
    for machine in pair:
        machine.do("setsid", "--fork", "sleep", "600")
    wait_for(lambda: lost.processes("sleep") and other.processes("sleep"))
    victim = lost.processes("sleep")[0]
    lost.lose()
    assert not victim.is_running()
    assert len(other.processes("sleep")) == 1
    lost.boot()
    assert lost.processes("sleep") == []
    assert run_python(lost, "import socket; print(socket.gethostname())", tmp_path) == "node0"


def test_a_mount_is_seen_on_its_own_machine_alone(pair: tuple[Machine, ...], tmp_path: Path) -> None:
    small, other = pair
    (tmp_path / "disk").mkdir()
    small.do("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "disk"))
    size = "import shutil; print(shutil.disk_usage('disk').total)"
    assert run_python(small, size, tmp_path) == str(64 << 10)
    assert int(run_python(other, size, tmp_path)) > 64 << 10
    small.do("umount", str(tmp_path / "disk"))


def test_the_clock_of_one_machine_is_an_hour_ahead(pair: tuple[Machine, ...], tmp_path: Path) -> None:
    clocks = "import datetime, time; print(time.time(), datetime.datetime.now(datetime.UTC).timestamp())"
    env = shifted(tmp_path / "clock", seconds=3600)
    ahead = [float(word) for word in run_python(pair[0], clocks, tmp_path, PYTHONSAFEPATH="1", **env).split()]
    assert all(3595 < clock - time.time() < 3605 for clock in ahead)


def test_a_machine_is_lost_with_the_test_that_was_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from benchmarks.network import network\n"
        "from tests.nodes.machine import Machine\n"
        "with network(1) as hosts:\n"
        "    machine = Machine(hosts[0])\n"
        "    machine.boot()\n"
        "    machine.start(['sleep', '601'], Path('/'), os.environ, sys.stderr.buffer)\n"
        "    while not machine.processes('sleep'): pass\n"
        "    print(machine.processes('sleep')[0].pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    sleeper = Path("/proc", done.stdout.strip())
    assert done.stdout.strip().isdecimal(), done.stderr
    wait_for(lambda: not sleeper.exists())
