from __future__ import annotations

import functools

from benchmarks.train.exact import line, row_of
from benchmarks.train.ours import ours
from benchmarks.train.race import Course, Lap
from benchmarks.train.racer import contestant


def test_ratio_of_a_slower_exact_lap_is_above_one() -> None:
    course = Course("digits", processes=2, threads=1, lap=10, warm_laps=0, laps=2)
    close, exact = [Lap(1.0, 0.5), Lap(2.0, 0.5)], [Lap(1.5, 0.6), Lap(2.0, 0.8)]
    row = row_of(course, [{"ours": close, "exact": exact}])
    assert (row.median, row.low, row.high) == (1.25, 1.0, 1.5)
    assert (row.close_cpu_ms, row.exact_cpu_ms) == (50.0, 70.0)
    assert line(row).split() == ["digits", "2", "1.250", "(1.000", "to", "1.500)", "70.00", "ms", "50.00", "ms"]


def test_exact_contestant_is_ours_with_elastic_shards() -> None:
    found = contestant("exact")
    assert isinstance(found, functools.partial)
    assert found.func is ours
    assert found.keywords == {"elastic_shards": 4}
