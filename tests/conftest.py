"""What holds for every test: the user code one test imports is gone before the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _no_user_code_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Projects name their files alike: a `codec` left in sys.modules would be taken for the next project's."""
    users = (f"{_EXAMPLES}{os.sep}", f"{tmp_path_factory.getbasetemp().resolve()}{os.sep}")
    yield
    sys.path[:] = [place for place in sys.path if not f"{place}{os.sep}".startswith(users)]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(users):
            del sys.modules[name]
