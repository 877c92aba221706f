"""Imports that stay cheap."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """Within it these count as not installed, unless they are in memory already.

    The Kubernetes client, which kserve imports too, takes kubernetes-validate along where it is installed: that
    compiles a grammar, which takes longer than all other imports of the service together.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's own sign for "not to be found"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
