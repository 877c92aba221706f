from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap  # type: ignore[import-untyped]

from pipeline.contract.statistics import bootstrap as own_bootstrap
from pipeline.contract.statistics.bootstrap import Interval, Method, mean_interval, resampled_means


@pytest.mark.parametrize(("method", "name"), [("bca", "BCa"), ("percentile", "percentile")])
@pytest.mark.parametrize("kind", ["skewed", "few values", "even"])
def test_interval_agrees_with_scipy(method: Method, name: str, kind: str) -> None:
    generator = np.random.default_rng(3)
    values = {
        "skewed": 0.1 * generator.exponential(size=40),
        "few values": generator.choice([-1.0, 0.0, 1.0], size=400, p=[0.1, 0.7, 0.2]) / 10,
        "even": generator.normal(0.0, 0.1, size=80),
    }[kind]
    expected = bootstrap((values,), np.mean, n_resamples=100_000, method=name, batch=10_000, rng=1).confidence_interval
    found = mean_interval(values, 0.95, 100_000, seed=0, method=method)
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], abs=1e-3)
    assert found.estimate == values.mean()


def test_constant_values_have_an_interval_of_zero_width() -> None:
    assert mean_interval(np.zeros(40), 0.95, 1000, seed=0) == Interval(0.0, 0.0, 0.0)


def test_interval_depends_on_the_seed_only() -> None:
    difference = np.random.default_rng(1).normal(size=200)
    first = mean_interval(difference, 0.95, 1000, seed=3)
    assert mean_interval(difference, 0.95, 1000, seed=3) == first
    assert mean_interval(difference, 0.95, 1000, seed=4) != first


def test_counting_distinct_values_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    difference = np.repeat([-1.0, 0.0, 1.0], [10, 270, 40])
    counted = mean_interval(difference, 0.95, 20_000, seed=0)
    monkeypatch.setattr(own_bootstrap, "_MAX_DISTINCT", 0)
    drawn = mean_interval(difference, 0.95, 20_000, seed=0)
    assert drawn.estimate == counted.estimate == pytest.approx(30 / 320)
    assert [drawn.low, drawn.high] == pytest.approx([counted.low, counted.high], abs=0.004)


@pytest.mark.parametrize("kind", ["normal", "long tail"])
def test_grouping_values_gives_the_same_distribution_of_means(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(6)
    values = generator.normal(size=6000) if kind == "normal" else generator.lognormal(sigma=1.2, size=6000)
    drawn = resampled_means(values, 5000, seed=0)
    monkeypatch.setattr(own_bootstrap, "_MAX_DRAWS", 0)
    grouped = resampled_means(values, 5000, seed=0)
    assert not np.array_equal(drawn, grouped)
    spread = drawn.std()
    assert grouped.std() == pytest.approx(spread, rel=0.04)
    assert np.quantile(grouped, [0.025, 0.975]) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.12 * spread)


def test_values_that_lose_variance_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.sort(np.concatenate([np.arange(3000) * 1e-9, [1e3 + i for i in range(400)]]))
    distinct, counts = np.unique(values, return_counts=True)
    grouped = own_bootstrap._group(distinct, counts)
    assert grouped is None or grouped[1].sum() == len(values)
    monkeypatch.setattr(own_bootstrap, "_MAX_LOST_VARIANCE", 0.0)
    assert own_bootstrap._group(distinct, counts) is None


def test_groups_keep_every_sample_and_the_mean() -> None:
    values = np.random.default_rng(2).lognormal(size=20_000)
    grouped = own_bootstrap._group(*np.unique(values, return_counts=True))
    assert grouped is not None
    means, counts = grouped
    assert counts.sum() == len(values)
    assert np.average(means, weights=counts) == pytest.approx(values.mean(), rel=1e-12)
    assert len(means) <= own_bootstrap._VALUE_GROUPS + 2 * own_bootstrap._EXTREMES


def test_interval_covers_the_true_value_as_promised() -> None:
    generator = np.random.default_rng(11)
    hits = 0
    for trial in range(1000):
        sample = generator.choice([-1.0, 0.0, 1.0], size=200, p=[0.1, 0.7, 0.2])
        found = mean_interval(sample, 0.95, 1000, seed=trial)
        hits += found.low <= 0.1 <= found.high
    assert 0.93 <= hits / 1000 <= 0.97


def test_interval_covers_the_mean_of_skewed_values() -> None:
    generator = np.random.default_rng(12)
    hits = 0
    for trial in range(1000):
        found = mean_interval(generator.exponential(size=120), 0.95, 500, seed=trial)
        hits += found.low <= 1.0 <= found.high
    assert 0.93 <= hits / 1000 <= 0.97


def test_large_sample_interval_matches_the_normal_approximation() -> None:
    values = np.random.default_rng(8).normal(0.01, 1.0, size=100_000)
    found = mean_interval(values, 0.95, 10_000, seed=0)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert [found.low, found.high] == pytest.approx([values.mean() - half, values.mean() + half], abs=0.05 * half)


def test_chunks_add_up_to_all_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_bootstrap, "_CHUNK_ELEMENTS", 1000)
    assert list(own_bootstrap._chunks(25, 100)) == [10, 10, 5]
    assert list(own_bootstrap._chunks(3, 5000)) == [1, 1, 1]
