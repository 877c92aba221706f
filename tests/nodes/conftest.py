"""Every test here needs a network of its own: the skip says why where there can be none."""

from __future__ import annotations

import pytest

from benchmarks.network import missing

from ..e2e.walker import Walker
from .cluster import TRAINING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason:
        for item in items:
            if "tests/nodes/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the same training by one process that nobody disturbs."""
    walker = Walker.fresh(tmp_path_factory.mktemp("undisturbed") / "sides")
    walker.pipe("run", "train", *TRAINING)
    return walker.weights
