"""Hosts with an address each on one switch: network namespaces that are gone at the end, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.system.errors import StageError

_FOLDERS = "/usr/sbin:/sbin"  # where ip and tc stand, which an ordinary PATH may leave out
_PREFIX = "pipe"  # of namespaces: pipe-OWNER'S PID-NUMBER
_SUBNET = "10.213.77"


@dataclass(frozen=True)
class Host:
    """One network namespace and its cable to the switch."""

    namespace: str
    switch: str  # the namespace the other end of the cable is in
    number: int

    @property
    def interface(self) -> str:
        return f"{_PREFIX}{self.number}"

    @property
    def address(self) -> str:
        return f"{_SUBNET}.{self.number + 1}"

    def argv(self, argv: Sequence[str]) -> list[str]:
        return [_program("ip"), "netns", "exec", self.namespace, *argv]

    def slow(self, megabits: float) -> None:
        """Limit the rate at which the host sends."""
        burst_kb = max(2, round(2.5 * megabits))  # 20 ms; less than a packet lets nothing through
        shape = ["tbf", "rate", f"{round(megabits * 1000)}kbit", "burst", f"{burst_kb}kb", "latency", "400ms"]
        _do("tc", "-n", self.namespace, "qdisc", "replace", "dev", self.interface, "root", *shape)

    def fast(self) -> None:
        _do("tc", "-n", self.namespace, "qdisc", "delete", "dev", self.interface, "root")

    def deafen(self) -> None:
        """Drop all that is sent to the host, which keeps its carrier: what it sends itself arrives."""
        nothing = ["tbf", "rate", "8bit", "burst", "1", "limit", "1"]  # every packet is larger
        _do("tc", "-n", self.switch, "qdisc", "replace", "dev", self.interface, "root", *nothing)

    def hear(self) -> None:
        _do("tc", "-n", self.switch, "qdisc", "delete", "dev", self.interface, "root")

    def cut(self) -> None:
        """Take the link down at the switch, so that the host loses its carrier."""
        _do("ip", "-n", self.switch, "link", "set", self.interface, "down")

    def restore(self) -> None:
        _do("ip", "-n", self.switch, "link", "set", self.interface, "up")


def missing() -> str:
    """Return why network namespaces cannot be created here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{' and '.join(absent)} (of iproute2 and util-linux) not found"
    result = subprocess.run([_program("unshare"), "--net", "true"], capture_output=True, text=True, check=False)
    return f"network namespaces cannot be made here: {result.stderr.strip()}" if result.returncode else ""


@contextlib.contextmanager
def network(count: int, megabits: float = 0) -> Iterator[tuple[Host, ...]]:
    """Create hosts that reach only each other; each sends at most `megabits` per second, if given."""
    sweep()
    prefix = f"{_PREFIX}-{os.getpid()}"
    hosts = tuple(Host(f"{prefix}-{number}", f"{prefix}-switch", number) for number in range(count))
    with contextlib.ExitStack() as stack:
        for name in (f"{prefix}-switch", *(host.namespace for host in hosts)):
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "delete", name)
        _do("ip", "-n", f"{prefix}-switch", "link", "add", "switch", "type", "bridge")
        _do("ip", "-n", f"{prefix}-switch", "link", "set", "switch", "up")
        for host in hosts:
            _plug(host)
            if megabits:
                host.slow(megabits)
        yield hosts


def sweep() -> None:
    """Remove the namespaces of owners that were killed."""
    for name in _namespaces():
        owner = name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            try:
                _do("ip", "netns", "delete", name)
            except StageError:
                if name in _namespaces():  # otherwise another process removed it
                    raise


def _namespaces() -> list[str]:
    names = [line.split()[0] for line in _do("ip", "netns", "list").splitlines()]
    return [name for name in names if name.startswith(f"{_PREFIX}-")]


def _plug(host: Host) -> None:
    """Connect the host and the switch by a veth pair with the same interface name at both ends."""
    name = host.interface
    _do("ip", "link", "add", name, "netns", host.namespace, "type", "veth", "peer", name, "netns", host.switch)
    _do("ip", "-n", host.switch, "link", "set", name, "master", "switch", "up")
    _do("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", name)
    _do("ip", "-n", host.namespace, "link", "set", name, "up")
    _do("ip", "-n", host.namespace, "link", "set", "lo", "up")


def _do(program: str, *arguments: str) -> str:
    result = subprocess.run([_program(program), *arguments], capture_output=True, text=True, timeout=30, check=False)
    if result.returncode:
        raise StageError(f"{program} {' '.join(arguments)} failed: {result.stderr.strip()[:300]}")
    return result.stdout


def _program(name: str) -> str:
    path = shutil.which(name, path=_path())
    assert path is not None, name
    return path


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{_FOLDERS}"
