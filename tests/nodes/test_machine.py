"""The simulated machines of these tests are isolated from each other."""

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


def test_lost_machine_ends_its_processes_and_boots_again(pair: tuple[Machine, ...], tmp_path: Path) -> None:
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


def test_mount_is_visible_only_on_its_machine(pair: tuple[Machine, ...], tmp_path: Path) -> None:
    small, other = pair
    (tmp_path / "disk").mkdir()
    small.do("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "disk"))
    size = "import shutil; print(shutil.disk_usage('disk').total)"
    assert run_python(small, size, tmp_path) == str(64 << 10)
    assert int(run_python(other, size, tmp_path)) > 64 << 10
    small.do("umount", str(tmp_path / "disk"))


def test_clock_of_a_machine_can_be_shifted(pair: tuple[Machine, ...], tmp_path: Path) -> None:
    clocks = "import datetime, time; print(time.time(), datetime.datetime.now(datetime.UTC).timestamp())"
    env = shifted(tmp_path / "clock", seconds=3600)
    ahead = [float(word) for word in run_python(pair[0], clocks, tmp_path, PYTHONSAFEPATH="1", **env).split()]
    assert all(3595 < clock - time.time() < 3605 for clock in ahead)


def test_machine_ends_with_a_killed_test(tmp_path: Path) -> None:
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
