"""Writing files so that a reader, or a crash, never meets half of one."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from pipeline.spec.errors import ResourceError


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write aside, fsync, rename: the name holds the old content or the new, nothing between."""
    body = data.encode() if isinstance(data, str) else data
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Deterministic JSON, so that equal content has an equal digest; NaN is refused."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def unwritable(path: Path, error: OSError) -> ResourceError:
    """What is in the way of a file, in one line: another file in a directory's place, rights, a full disk."""
    place = f"{error.filename}: " if error.filename not in (None, str(path)) else ""
    reason = os.strerror(error.errno or 0).lower()
    return ResourceError(f"cannot write {path}: {place}{reason}; mend that, then `pipe run --resume`")


def sync_directory(directory: Path) -> None:
    """Make a rename in this directory survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """fsync every file below a directory, and the directories themselves."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        elif path.is_dir():
            sync_directory(path)
    sync_directory(directory)
