"""Every test here needs a network of its own: the skip says why where there can be none."""

from __future__ import annotations

import pytest

from bench.network import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason:
        for item in items:
            if "tests/nodes/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
