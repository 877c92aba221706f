"""What holds for every test: the user code one test imports is gone before the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _no_user_code_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Projects name their files alike: a `codec` left in sys.modules would be taken for the next project's."""
    users = (_EXAMPLES, tmp_path_factory.getbasetemp().resolve())
    yield
    sys.path[:] = [place for place in sys.path if not any(Path(place).is_relative_to(folder) for folder in users)]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and any(Path(file).is_relative_to(folder) for folder in users):
            del sys.modules[name]
