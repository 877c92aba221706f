"""A finished run for all tests; tests that change something work on a copy."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from .project_folder import ProjectFolder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectFolder]:
    """The project after `pipe run all`, with its service live. No test changes it.

    Of several test processes, the first runs it for all, and the last one stops the service.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    folder = shared / "finished" / "sides"
    with (shared / "finished.used").open("a") as used:
        with exclusive(shared):
            if not ProjectFolder.has_live_service(folder):
                project = ProjectFolder.existing(folder) if folder.exists() else ProjectFolder.create(folder)
                project.pipe("run", "all")
            fcntl.flock(used, fcntl.LOCK_SH)
        project = ProjectFolder.existing(folder)
        try:
            yield project
        finally:
            with exclusive(shared), contextlib.suppress(BlockingIOError):  # others still use it
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                project.stop()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    with (folder / "finished.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def expected(finished: ProjectFolder) -> bytes:
    """The weights of an undisturbed training."""
    return finished.weights


@pytest.fixture
def copied(finished: ProjectFolder, tmp_path: Path) -> Iterator[ProjectFolder]:
    """A copy of the finished run without its service, which a test may change."""
    project = finished.copy(tmp_path / "sides")
    yield project
    project.stop()
