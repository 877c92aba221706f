"""Free ports for tests, from a range of each worker's own below the kernel's ephemeral ports.

A port that the kernel picked and a test released again may be given to any other connection before it is used. Several
suites on one machine begin at different ports of a range.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _PER_WORKER = 12_000, 1_500
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_start = _FIRST + _worker % 12 * _PER_WORKER
_ports = range(_start, _start + _PER_WORKER, 2)  # in steps of two: gRPC uses the next port
_first = os.getpid() * 199 % len(_ports)
_candidates = itertools.cycle(itertools.chain(_ports[_first:], _ports[:_first]))


def free_port() -> int:
    """Return a port that nothing listens on, nor on the next one; no other test gets either for a while."""
    for port in _candidates:
        if _is_free(port) and _is_free(port + 1):
            return port
    raise AssertionError("unreachable: the candidates never end")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
