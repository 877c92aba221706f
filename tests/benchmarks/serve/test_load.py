"""Parsing of the output of wrk and h2load."""

from __future__ import annotations

import math

import pytest

from benchmarks.serve.load import LoadResult, percentile, read_h2load, read_wrk
from pipeline.system.errors import StageError


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 51.0), (0.99, 100.0), (1.0, 100.0)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([float(one) for one in range(1, 101)], share) == value


def test_percentile_of_no_values_is_infinite() -> None:
    assert percentile([], 0.5) == math.inf


def test_times_of_wrk_are_in_microseconds() -> None:
    text = "Running 2s test\n  12 requests in 2.00s\nFOUND 12000 2000000 3 1500 20500\n"
    assert read_wrk(text) == LoadResult(12000, 6000.0, 1.5, 20.5, 3)


def test_output_and_log_of_h2load_are_read() -> None:
    text = "finished in 2.00s, 2.00 req/s, 1.2KB/s\nrequests: 4 total"
    lines = ["1\t200\t1000", "2\t200\t2000", "3\t503\t3000", "4\t200\t4000"]
    assert read_h2load(text, lines) == LoadResult(4, 2.0, 3.0, 4.0, 1)


@pytest.mark.parametrize("read", [read_wrk, lambda text: read_h2load(text, [])])
def test_error_of_a_load_generator_is_reported(read: object) -> None:
    assert callable(read)
    with pytest.raises(StageError, match="unable to connect"):
        read("unable to connect to 127.0.0.1")
