"""One walked road for all: tests that change something work on a copy."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from .walker import Walker


@pytest.fixture(scope="session")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    """The tiny project after `pipe run all` from an empty folder, its service live. Nobody changes it.

    Where several processes test, the first walks it for all, and the last to leave ends the service.
    """
    base = tmp_path_factory.getbasetemp()
    place = base.parent if base.name.startswith("popen-") else base
    folder = place / "road" / "sides"
    with (place / "road.used").open("a") as used:
        with alone(place):
            if not Walker.lives_in(folder):
                walker = Walker.of(folder) if folder.exists() else Walker.fresh(folder)
                walker.pipe("run", "all")
            fcntl.flock(used, fcntl.LOCK_SH)
        walker = Walker.of(folder)
        try:
            yield walker
        finally:
            with alone(place), contextlib.suppress(BlockingIOError):  # others still use it
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                walker.stop()


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    with (place / "road.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def copied(road: Walker, tmp_path: Path) -> Iterator[Walker]:
    """The walked road with nothing live, to do with as one likes."""
    walker = road.copy(tmp_path / "sides")
    yield walker
    walker.stop()
