"""One walked road for all: tests that change something work on a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .walker import Walker


@pytest.fixture(scope="session")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    """The tiny project after `pipe run all` from an empty folder, its service live. Nobody changes it."""
    walker = Walker.fresh(tmp_path_factory.mktemp("road") / "sides")
    try:
        walker.pipe("run", "all")
        yield walker
    finally:
        walker.stop()


@pytest.fixture
def copied(road: Walker, tmp_path: Path) -> Iterator[Walker]:
    """The walked road with nothing live, to do with as one likes."""
    walker = road.copy(tmp_path / "sides")
    yield walker
    walker.stop()
