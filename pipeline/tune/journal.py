"""Optuna's journal of a study: one file that several workers, on several machines, append to."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO, TextIO

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock


def open_journal(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path), KernelLock(path)))


class KernelLock(JournalFileOpenLock):
    """Held by the kernel: Optuna's own locks are files, and one that a killed process left stops everybody for 30 s.

    A process killed while it wrote leaves half a line, which would spoil the next one: it is cut off first.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._held: TextIO | None = None

    def acquire(self) -> bool:
        self._held = self._journal.with_suffix(".lock").open("a")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        cut_half_line(self._journal)
        return True

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None


def cut_half_line(path: Path) -> None:
    """Of a file whose last line has no end, that line."""
    with path.open("r+b") as file:
        size = place = file.seek(0, 2)
        while place and _byte(file, place - 1) != b"\n":
            place -= 1
        if place < size:
            file.truncate(place)


def _byte(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.read(1)
