"""All tests here need network namespaces, and are skipped with the reason if these are not available."""

from __future__ import annotations

import pytest

from benchmarks.network import missing

from ..e2e.project_folder import ProjectFolder
from .cluster import TRAINING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason:
        for item in items:
            if "tests/nodes/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of the same training by one process without faults."""
    project = ProjectFolder.create(tmp_path_factory.mktemp("undisturbed") / "sides")
    project.pipe("run", "train", *TRAINING)
    return project.weights
