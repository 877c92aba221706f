"""Two network namespaces joined by one slow cable; they are gone at the end, whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.spec.errors import StageError

_FOLDERS = "/usr/sbin:/sbin"  # where ip and tc stand, which an ordinary PATH may leave out


@dataclass(frozen=True)
class End:
    """One end of the cable."""

    namespace: str
    interface: str
    address: str

    def argv(self, argv: Sequence[str]) -> list[str]:
        return [_program("ip"), "netns", "exec", self.namespace, *argv]


def missing() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc") if shutil.which(name, path=_path()) is None]
    return f"{' and '.join(absent)} from iproute2 not found" if absent else ""


@contextlib.contextmanager
def cable(megabits: int) -> Iterator[tuple[End, End]]:
    """Both ends send at `megabits` per second at most."""
    names = [f"pipe-{os.getpid()}-{i}" for i in range(2)]
    ends = tuple(End(name, f"pipe{i}", f"10.213.77.{i + 1}") for i, name in enumerate(names))
    with contextlib.ExitStack() as stack:
        for end in ends:
            _do("ip", "netns", "add", end.namespace)
            stack.callback(_do, "ip", "netns", "delete", end.namespace)
        first, second = ends
        pair = ["name", first.interface, "netns", first.namespace, "type", "veth"]
        _do("ip", "link", "add", *pair, "peer", second.interface, "netns", second.namespace)
        for end in ends:
            _do("ip", "-n", end.namespace, "address", "add", f"{end.address}/24", "dev", end.interface)
            _do("ip", "-n", end.namespace, "link", "set", end.interface, "up")
            _do("ip", "-n", end.namespace, "link", "set", "lo", "up")
            shape = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "400ms"]
            _do("tc", "-n", end.namespace, "qdisc", "add", "dev", end.interface, "root", *shape)
        yield first, second


def _do(program: str, *words: str) -> None:
    done = subprocess.run([_program(program), *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise StageError(f"{program} {' '.join(words)} failed: {done.stderr.strip()[:300]}")


def _program(name: str) -> str:
    found = shutil.which(name, path=_path())
    assert found is not None, name
    return found


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:{_FOLDERS}"
