"""Simulated hosts on a switch, made of network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.network import Host, missing, network

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "namespaces can be made here")
_LISTEN = (
    "import socket; s = socket.create_server(('', 4000)); print('open', flush=True); [s.accept() for _ in range(3)]"
)
_KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 4000), 1).close()"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def pair() -> Iterator[tuple[Host, ...]]:
    with network(2, megabits=100) as hosts:
        yield hosts


def reaches(host: Host, other: Host) -> bool:
    argv = host.argv([sys.executable, "-c", _KNOCK, other.address])
    return subprocess.run(argv, capture_output=True, timeout=10, check=False).returncode == 0


def test_hosts_reach_each_other_unless_a_cable_is_out(pair: tuple[Host, ...]) -> None:
    near, far = pair
    argv = far.argv([sys.executable, "-c", _LISTEN])
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == b"open\n"
            assert reaches(near, far)
            far.cut()
            assert not reaches(near, far)
            far.restore()
            assert reaches(near, far)
        finally:
            listener.kill()


def test_a_slow_host_is_fast_again(pair: tuple[Host, ...]) -> None:
    shown = pair[0].argv(["tc", "qdisc", "show", "dev", pair[0].interface])
    pair[0].slow(0.5)
    assert "rate 500Kbit" in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    pair[0].fast()
    assert "tbf" not in subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def test_namespaces_left_by_a_killed_owner_are_removed() -> None:
    program = (
        "import os, signal\n"
        "from benchmarks.network import network\n"
        "with network(1) as hosts:\n"
        "    print(hosts[0].namespace, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.strip()
    assert left in namespaces()
    with network(1) as hosts:
        assert left not in namespaces()
        assert hosts[0].namespace in namespaces()
    assert hosts[0].namespace not in namespaces()
