"""File locks, which the kernel releases when their process ends, and file systems without them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pipeline.system.errors import ResourceError

# Errors of a file system without locks (Lustre mounted without `flock`, NFS without lockd) or hard links (a bucket).
NOT_SUPPORTED = (errno.EPERM, errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def lock_file(file: IO[str], operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file as `fcntl.flock` does; return False where the file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return False
    return True


@contextlib.contextmanager
def exclusive_lock(path: Path, need: str = "") -> Iterator[None]:
    """Lock a file for a short time; wait for it.

    Where there are no locks, raise an error that ends with the `need` for one and what to do; without a need, go on.
    """
    with path.open("a+") as file:
        if not lock_file(file) and need:
            raise no_locks(path.parent, need)
        yield


def no_locks(folder: Path, need: str) -> ResourceError:
    return ResourceError(f"{folder}: this file system has no locks, {need}")
