"""Fixtures of all tests: the user code that one test imports is removed before the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _remove_user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove modules of projects: a `codec` left in sys.modules would be used by the next project."""
    users = (f"{_EXAMPLES}{os.sep}", f"{tmp_path_factory.getbasetemp().resolve()}{os.sep}")
    yield
    sys.path[:] = [place for place in sys.path if not f"{place}{os.sep}".startswith(users)]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(users):
            del sys.modules[name]
