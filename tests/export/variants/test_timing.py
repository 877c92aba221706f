"""Quantiles of times with confidence bounds, and ratios that do not depend on the load of the machine."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper
from scipy import stats  # type: ignore[import-untyped]

from export.variants.timing import measure_times, quantile_bounds, time_ratio, timing
from pipeline.contract.codec import Array

from .net import graph


@pytest.mark.parametrize(("count", "level"), [(7, 0.5), (100, 0.5), (1000, 0.99), (400, 0.99)])
def test_bounds_are_the_order_statistics_that_scipy_gives(count: int, level: float) -> None:
    values = np.random.default_rng(0).permutation(np.arange(1.0, count + 1))
    low, high = quantile_bounds(values, level, 0.95)
    found = stats.quantile_test(values, q=values[0], p=level).confidence_interval(confidence_level=0.95)
    assert (low, high) == (found.low, found.high)


def test_too_few_values_have_no_bound() -> None:
    assert quantile_bounds(np.arange(5.0), 0.5, 0.95) == (-math.inf, math.inf)
    assert quantile_bounds(np.arange(100.0), 0.99, 0.95)[1] == math.inf


def test_bounds_have_their_stated_coverage() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        low, high = quantile_bounds(rng.exponential(size=100), 0.5, 0.95)
        hits += low <= math.log(2) <= high
    assert 0.93 <= hits / 400 <= 0.985  # order statistics are discrete, so their coverage exceeds the level


def test_share_of_time_is_measured_in_rounds() -> None:
    rng = np.random.default_rng(1)
    slow = np.where(np.arange(40) < 13, 5.0, 1.0)  # in a third of the rounds everything took five times as long
    first: list[Array] = [pace * rng.normal(1e-3, 2e-5, 10) for pace in slow]
    other: list[Array] = [pace * rng.normal(6e-4, 2e-5, 10) for pace in slow]
    share = time_ratio({1: other}, {1: first}, 0.95)
    assert 0.58 < share.low <= share.estimate <= share.high < 0.62
    message = timing({1: other, 32: first}, {1: first, 32: first}, 0.95)
    assert message.share.estimate == pytest.approx(math.sqrt(share.estimate), rel=0.01)  # a gain at one of two sizes
    assert message.p50_ms[1].low <= 0.6 <= message.p50_ms[1].high
    assert message.p99_ms[32].estimate > 4


def test_smaller_file_is_measured_faster(tmp_path: Path) -> None:
    paths = {}
    for name, inner in (("large", 2048), ("small", 8)):
        weights = [np.ones((16, inner), np.float32), np.ones((inner, 4), np.float32)]
        nodes = [helper.make_node("MatMul", ["x", "w0"], ["h"]), helper.make_node("MatMul", ["h", "w1"], ["y"])]
        tensors = [numpy_helper.from_array(array, f"w{place}") for place, array in enumerate(weights)]
        paths[name] = graph(tmp_path / f"{name}.onnx", nodes, tensors, 16, 4)
    found = measure_times(paths, {32: {"x": np.ones((32, 16), np.float32)}}, 0.2, 1, 0.95)
    assert found["large"].share.estimate == 1.0
    assert found["small"].share.high < 0.5
    assert 0 < found["small"].p50_ms[32].estimate < found["large"].p50_ms[32].estimate
