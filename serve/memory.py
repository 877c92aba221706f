"""The memory of this process: what it may take, what it takes, and how it gives some back."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit() -> int:
    """Return the memory of the container, or of the machine if there is no limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _limit_files():
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # no such controller, or `max`
            continue
    return min(limits)


def _limit_files() -> list[Path]:
    """Return the files that may contain a limit: of this process's groups, and as a container shows them."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # no Linux
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        for place in (group.lstrip("/"), ""):
            if not controllers:
                files += [root / place / "memory.max" for root in (_CGROUPS, _CGROUPS / "unified")]
            elif "memory" in controllers.split(","):
                files.append(_CGROUPS / "memory" / place / "memory.limit_in_bytes")
    return files


def resident_memory() -> int:
    """Return the memory that this process takes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux: as little as the service takes with a small model
        return 100 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")


def return_memory() -> None:
    """Give memory that is free back to the system, which glibc keeps in case the process needs it again."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
