from __future__ import annotations

import math

import pytest

from pipeline.system.html import number, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.0, "0"),
        (0.98889, "0.9889"),
        (0.021, "0.021"),
        (0.00012346, "0.0001235"),
        (3.2e-6, "3.2×10⁻⁶"),
        (-3.21987e-6, "−3.22×10⁻⁶"),
        (12.3456, "12.35"),
        (1234.56, "1,235"),
        (360, "360"),
        (2.5e20, "2.5×10²⁰"),
    ],
)
def test_numbers_have_four_significant_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_differences_of_small_units_are_not_zero() -> None:
    assert [signed(value) for value in (3.2e-6, -3.2e-6, 0.0, -0.0, 0.025)] == [
        "+3.2×10⁻⁶", "−3.2×10⁻⁶", "0", "0", "+0.025"
    ]  # fmt: skip
