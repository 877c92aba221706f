from __future__ import annotations

import math
import re
from datetime import timedelta

import pytest

from pipeline.system.sources import SOURCE_ROOT
from pipeline.system.wording import age, align, clock, milliseconds, number, percent, seconds, signed, size


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


def test_numbers_of_fewer_digits_have_no_exponent() -> None:
    assert [number(value, 2) for value in (0.05, 9.96, 99.6, 271.3)] == ["0.05", "10", "100", "271"]
    assert [milliseconds(value) for value in (12.34, 999.7, 43210.9)] == ["12.3 ms", "1,000 ms", "43,211 ms"]


def test_seconds_in_messages_have_no_exponent() -> None:
    sources = (path for stage in ("k8s", "pipeline", "serve", "train") for path in (SOURCE_ROOT / stage).rglob("*.py"))
    assert [path.name for path in sources if re.search(r":[#.\d]*g\} s\b", path.read_text())] == []


def test_differences_of_small_units_are_not_zero() -> None:
    assert [signed(value) for value in (3.2e-6, -3.2e-6, 0.0, -0.0, 0.025)] == [
        "+3.2×10⁻⁶", "−3.2×10⁻⁶", "0", "0", "+0.025"
    ]  # fmt: skip


def test_times_sizes_and_shares_have_the_unit_that_fits() -> None:
    values = (0.0213, 9.44, 200, 7322, None)
    assert [seconds(value) for value in values] == ["21 ms", "9.4 s", "3 min 20 s", "2 h 02 min", "–"]
    assert [size(value) for value in (512, 3 << 20, 1 << 43, None)] == ["512 bytes", "3.0 MiB", "8192.0 GiB", "–"]
    assert [percent(value) for value in (0.98889, None)] == ["98.9%", "–"]
    assert [clock(value) for value in (0.2, 7, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]
    ages = [age(timedelta(seconds=value)) for value in (59, 61, 7300, 90_000, -3)]
    assert ages == ["59 s", "1 min", "2 h", "1 d", "0 s"]


def test_last_cell_of_a_short_row_does_not_widen_its_column() -> None:
    rows = [("pod", "state", "rate"), ("a", "ready", "100.5"), ("long name", "cannot pull its image")]
    assert align(rows, texts=2) == [
        "pod        state   rate",
        "a          ready  100.5",
        "long name  cannot pull its image",
    ]
