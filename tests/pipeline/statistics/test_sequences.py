"""Sequential tests keep their false-alarm rate however often one looks, and find changes as fast as promised.

The long tests simulate what docs/monitoring.md has in its table; they print the numbers: `pytest -s -m long`.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from pipeline.statistics.aggregates import Floats
from pipeline.statistics.sequences import Betting, divergence, later_share, mean_interval, share_limits

ALPHA = 0.01
PROMISE = 0.95


def accuracy_tests(streams: int, labels: int, change: int, mean: float, seed: int = 0, alpha: float = ALPHA) -> Betting:
    """Look after every label at streams of right and wrong answers, which are worse from `change` on."""
    random, tests = np.random.default_rng(seed), Betting(np.array([1 - PROMISE]), [1], 1 / alpha, (streams,))
    for start in range(0, labels, 500):
        times = np.arange(start, min(start + 500, labels))
        right = np.where(times < change, PROMISE, mean)[:, None, None]
        tests.update((random.random((len(times), streams, 1)) >= right).astype(float), times)
    return tests


def test_batches_of_any_size_give_the_same_result() -> None:
    random = np.random.default_rng(1)
    values, limits, times = random.random((60, 3)), np.array([0.4, 0.5, 0.2]), np.arange(60.0)
    whole, parts = (Betting(limits, [2, 1], 20.0) for _ in range(2))
    whole.update(values, times)
    for start, stop in ((0, 1), (1, 30), (30, 30), (30, 60)):
        state = json.loads(json.dumps(parts.state()))
        parts = Betting(limits, [2, 1], 20.0)
        parts.restore(state)
        parts.update(values[start:stop], times[start:stop])
    assert whole.state() == parts.state()


def test_capital_does_not_grow_on_average_at_the_limit() -> None:
    """The mean of e-values over all sequences of six coins is 1, for every bet and beginning."""
    coins = np.array(np.meshgrid(*[[0.0, 1.0]] * 6)).reshape(6, -1)
    tests = Betting(np.array([0.3]), [1], math.inf, (coins.shape[1],))
    tests.update(coins[..., None], np.arange(6))
    chances = (0.3**coins * 0.7 ** (1 - coins)).prod(axis=0)
    assert chances @ tests.e_values[:, 0] == pytest.approx(1.0)


def test_absent_values_change_no_capital_of_bets_that_have_begun() -> None:
    tests = Betting(np.array([0.3, 0.3]), [1, 1], math.inf)
    tests.update(np.array([[1.0, 1.0], [1.0, np.nan], [1.0, np.nan]]), range(3))
    once = Betting(np.array([0.3]), [1], math.inf)
    once.update(np.array([[1.0]]), [0])
    assert tests.e_values[0] > 2 * tests.e_values[1]
    assert tests.e_values[1] == pytest.approx(once.e_values[0])
    assert tests.counts.tolist() == [3, 1]


def test_alarm_has_the_time_of_the_value_and_about_that_of_the_change() -> None:
    values = np.concatenate([np.tile([0.0] * 19 + [1.0], 50), np.tile([0.0, 1.0], 100)])
    tests = Betting(np.array([0.06]), [1], 1 / ALPHA)
    tests.update(values[:, None], np.arange(len(values)))
    assert 1000 < tests.alarms[0] < 1050
    assert 950 <= tests.since[0] <= 1005
    count, total = tests.latest(0, 0)
    assert count == len(values) - tests.since[0]
    assert total / count == pytest.approx(0.5, abs=0.02)


def test_large_capital_is_bounded() -> None:
    tests = Betting(np.array([1e-4]), [1], 1 / ALPHA)
    tests.update(np.ones((500, 1)), np.arange(500))
    assert np.isfinite(tests.e_values).all()
    assert tests.alarms[0] <= 1


def test_limits_hold_for_nearly_all_samples() -> None:
    random, share, error = np.random.default_rng(0), 0.3, 0.05
    low, high = share_limits(random.binomial(1000, share, 2000).astype(float), 1000, error)
    assert (low > share).mean() <= error
    assert (high < share).mean() <= error
    assert (high - low).mean() < 0.09
    assert share_limits(np.array([0.0, 10.0]), 10, error)[0].tolist() == [0.0, pytest.approx(0.05**0.1)]


def test_interval_contains_the_mean_at_every_look() -> None:
    random, streams = np.random.default_rng(3), 100
    missed = 0
    for _ in range(streams):
        sums = (random.random(400) < 0.8).cumsum()
        intervals = [mean_interval(float(sums[count - 1]), count, 0.1) for count in range(20, 401, 20)]
        missed += not all(interval is not None and interval.low <= 0.8 <= interval.high for interval in intervals)
        last = intervals[-1]
        assert last is not None
        assert last.estimate == sums[-1] / 400
        assert last.high - last.low < 0.2
    assert missed <= 0.1 * streams
    assert mean_interval(0, 0, 0.1) is None


def test_interval_below_the_promise_comes_with_an_alarm() -> None:
    tests = Betting(np.array([1 - PROMISE]), [1], 1 / ALPHA)
    values = (np.random.default_rng(5).random(600) < 0.85).astype(float)
    for i, value in enumerate(values):
        tests.update(np.array([[1 - value]]), [i])
        interval = mean_interval(float(values[: i + 1].sum()), i + 1, ALPHA)
        assert interval is not None
        if interval.high < PROMISE:
            assert tests.alarms[0] <= i
    assert interval is not None
    assert interval.high < PROMISE


def test_few_false_alarms_in_short_streams() -> None:
    assert np.isfinite(accuracy_tests(200, 500, 500, PROMISE).alarms).mean() <= ALPHA + 0.01


@pytest.mark.long
def test_false_alarms_of_the_metric_are_rarer_than_alpha() -> None:
    tests = accuracy_tests(1000, 10_000, 10_000, PROMISE)
    rate = np.isfinite(tests.alarms).mean()
    print(f"metric: {rate:.2%} of 1,000 streams of 10,000 labels without change raise an alarm at alpha {ALPHA}")
    assert rate <= ALPHA


def detection_labels(promise: float, mean: float, alpha: float, after: int = 0) -> float:
    """Return about how many values a fall to `mean` needs to be found, once `after` values were as promised.

    Information of ln 1/alpha at the rate of the divergence is what any test needs that is ready for this very change
    (Wald); to be ready at all times costs the logarithm of the share of the capital that bets around that time.
    """
    rate = float(divergence(np.array(mean), np.array(promise)))
    share = later_share(after) - later_share(after + math.ceil(1 / rate))
    return (math.log(1 / alpha) + math.log(1 / share)) / rate


@pytest.mark.long
@pytest.mark.parametrize("change", [0, 1000, 10_000])
def test_drop_of_accuracy_is_found_within_the_labels_of_the_theory(change: int) -> None:
    tests = accuracy_tests(1000, change + 3000, change, 0.90, seed=change + 1)
    found = tests.alarms[:, 0] >= change
    delay, theory = float((tests.alarms[found, 0] - change + 1).mean()), detection_labels(PROMISE, 0.90, ALPHA, change)
    print(f"drop after {change} labels: found {delay:.0f} labels later, theory {theory:.0f}")
    assert np.isfinite(tests.alarms).all()
    assert found.mean() >= 1 - ALPHA
    assert delay <= 1.2 * theory


@pytest.mark.long
def test_drop_from_the_beginning_is_found_nearly_as_fast_as_any_test_could() -> None:
    tests, best = accuracy_tests(1000, 3000, 0, 0.90, seed=9), math.log(1 / ALPHA)
    best /= 0.9 * math.log(0.9 / 0.95) + 0.1 * math.log(0.1 / 0.05)
    delay = float((tests.alarms + 1).mean())
    print(f"drop from the beginning: found after {delay:.0f} labels; Wald's bound for one known drop is {best:.0f}")
    assert delay <= 1.2 * best


COLUMNS, QUANTILES = 30, 9


def drift_tests(streams: int, requests: int, change: int, shift: float, training: int = 10_000) -> Betting:
    """Look after every request at columns of normal numbers, of which the first one shifts; each stream has its own
    training data."""
    random, cuts = np.random.default_rng(7), (np.arange(1, QUANTILES + 1) * training) // (QUANTILES + 1)
    edges = np.empty((streams, COLUMNS, QUANTILES + 2))
    for stream in range(streams):
        data = np.sort(random.standard_normal((training, COLUMNS)), axis=0)
        edges[stream] = np.stack([np.nextafter(data[0], -np.inf), *data[cuts], data[-1]], axis=1)
    limits = drift_limits(np.concatenate([[0], cuts + 1, [training]]).astype(float), training)
    tests = Betting(np.tile(limits, COLUMNS), [len(limits)] * COLUMNS, COLUMNS / (0.4 * ALPHA), (streams,))
    for start in range(0, requests, 10):
        times = np.arange(start, start + 10)
        values = random.standard_normal((10, streams, COLUMNS))
        values[:, :, 0] += np.where(times < change, 0.0, shift)[:, None]
        below = (values[..., None] <= edges).astype(float)
        tests.update(np.concatenate([below, 1 - below], axis=-1).reshape(10, streams, -1), times)
    return tests


def drift_limits(counts: Floats, training: int) -> Floats:
    from pipeline.monitor.reference import TOLERANCE

    low, high = share_limits(counts, training, 0.1 * ALPHA / (2 * COLUMNS * len(counts)))
    return np.concatenate([np.minimum(high + TOLERANCE, 1), np.minimum(1 - low + TOLERANCE, 1)])


@pytest.mark.long
def test_false_alarms_of_thirty_columns_are_rarer_than_alpha() -> None:
    rates = [np.isfinite(drift_tests(250, 2000, 2000, 0.0, training).alarms).any(axis=1) for training in (1000, 10_000)]
    rate = np.concatenate(rates).mean()
    print(f"drift: {rate:.2%} of 500 streams of 2,000 requests without change raise an alarm at alpha {ALPHA}")
    assert rate <= ALPHA


@pytest.mark.long
@pytest.mark.parametrize("change", [0, 1000])
def test_drift_of_one_of_thirty_columns_is_found_within_2000_requests(change: int) -> None:
    tests = drift_tests(100, change + 2000, change, 0.5)
    delays = tests.alarms[:, 0] - change
    print(
        f"drift by half a standard deviation after {change} requests: found {delays.mean():.0f} requests later, ",
        end="",
    )
    print(f"at most {delays.max():.0f}; its beginning is off by {np.median(tests.since[:, 0] - change):.0f}")
    assert (delays >= 0).all()
    assert (delays < 2000).all()
    assert np.isinf(tests.alarms[:, 1:]).all()
