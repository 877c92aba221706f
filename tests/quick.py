"""A sample of a table for `make test`; `make test-long` runs the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(sample: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for `parametrize`; those that are not in the sample are marked long."""
    cases = list(cases)
    missing = [case for case in sample if case not in cases]
    assert not missing, f"not in the table: {missing}"
    return [case if case in sample else pytest.param(case, marks=pytest.mark.long) for case in cases]
