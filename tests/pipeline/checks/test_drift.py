from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]

from pipeline.checks.drift import differences, kolmogorov, psi
from pipeline.checks.profile import Feature, Histogram, Sketch, lay_out
from pipeline.spec.statistics.power import holm


def compare(before: Any, after: Any) -> Any:
    """The largest difference of one column between two sets."""
    first, second = ({"x": torch.as_tensor(side)} for side in (before, after))
    features = lay_out(first)
    sides = []
    for side in (first, second):
        sketch = Sketch(features)
        sketch.add(side)
        sides.append(sketch.histograms())
    return max(differences(features, *sides).values(), key=lambda one: one.psi)


def test_the_stability_index_is_the_textbooks() -> None:
    a, b = np.array([1000.0, 2000.0, 7000.0]), np.array([2000.0, 2000.0, 6000.0])
    p, q = a / a.sum(), b / b.sum()
    assert psi(a, b) == pytest.approx(float(((q - p) * np.log(q / p)).sum()), abs=1e-3)
    assert psi(a, 3 * a) == pytest.approx(0, abs=1e-6)
    assert np.isfinite(psi(np.array([10.0, 0.0]), np.array([0.0, 10.0]))), "an empty bin is no infinity"


@pytest.mark.parametrize(("n", "m", "shift"), [(40, 60, 0.0), (40, 60, 0.5), (300, 200, 0.2), (2000, 1500, 0.05)])
def test_the_chance_of_a_distance_is_scipys(n: int, m: int, shift: float) -> None:
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal(n), generator.standard_normal(m) + shift
    known = stats.ks_2samp(a, b, method="exact")
    assert kolmogorov(float(known.statistic), n, m) == pytest.approx(float(known.pvalue), abs=0.03)


def test_a_histogram_sees_nearly_the_whole_distance() -> None:
    generator = np.random.default_rng(4)
    a, b = generator.standard_normal(4000), generator.standard_normal(3000) + 0.3
    found, known = compare(a, b), stats.ks_2samp(a, b)
    distance = float(found.told.split()[2].rstrip(","))
    assert known.statistic - 1 / 32 < distance <= known.statistic + 1e-3
    assert found.p < 1e-10


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "few values", "flags", "mostly nothing"])
def test_one_distribution_is_one(kind: str) -> None:
    def draw(seed: int, count: int) -> Any:
        generator = np.random.default_rng(seed)
        return {
            "normal": lambda: generator.standard_normal(count),
            "heavy": lambda: generator.standard_cauchy(count),
            "constant": lambda: np.full(count, 7.0),
            "few values": lambda: generator.integers(0, 4, count),
            "flags": lambda: generator.random(count) < 0.1,
            "mostly nothing": lambda: np.where(generator.random(count) < 0.95, np.nan, generator.random(count)),
        }[kind]()  # type: ignore[no-untyped-call]

    found = compare(draw(1, 3000), draw(2, 1000))
    assert found.psi < 0.1 or found.p > 0.5
    assert found.p > 0.01


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (np.zeros(500), np.full(500, -1.0)),
        (np.zeros(500), np.full(500, 1.0)),
        (np.arange(500.0), np.arange(500.0) + 250),
        (np.arange(500.0) + 1e12, np.arange(500.0) * 0.1 + 1e12),
        (np.arange(500) % 3, np.full(500, 1)),
        (np.arange(500) % 2 == 0, np.full(500, True)),
        (np.arange(500) % 2, np.full(500, 9)),
    ],
    ids=["below a constant", "above it", "moved", "narrower, far from nought", "one class", "flags", "a new value"],
)
def test_another_one_is_another(before: Any, after: Any) -> None:
    found = compare(before, after)
    assert found.psi > 0.2
    assert found.p < 1e-6


def texts(seed: int, count: int, topics: int, first: int = 0) -> Any:
    """Each of one topic, so that its tokens come together."""
    generator = np.random.default_rng(seed)
    topic = generator.integers(first, first + topics, count)[:, None]
    return topic * 20 + generator.integers(0, 20, (count, 64))


def test_tokens_of_one_text_are_no_witnesses_of_each_other() -> None:
    """Ten texts more of one topic among 200 are chance, though 640 tokens more of it are not, taken one by one."""
    chances = [compare(texts(seed, 300, 10), texts(seed + 100, 100, 10)).p for seed in range(40)]
    assert sum(chance < 0.05 for chance in chances) <= 6
    assert compare(texts(1, 300, 10), texts(2, 100, 10, first=4)).p < 1e-6


def false_alarms(trials: int, seed: int) -> int:
    """Good random splits of 20 columns of every kind that raise an alarm."""
    generator = np.random.default_rng(seed)
    count = 0
    for _ in range(trials):
        columns = {f"c{i}": torch.as_tensor(generator.standard_normal(400) ** (1 + i % 3)) for i in range(14)}
        columns |= {f"i{i}": torch.as_tensor(generator.integers(0, 3 + i, 400)) for i in range(6)}
        train = {name: column[:240] for name, column in columns.items()}
        features = lay_out(train)
        found = []
        for part in (slice(0, 240), slice(240, 320), slice(320, 400)):
            sketch = Sketch(features)
            sketch.add({name: column[part] for name, column in columns.items()})
            found.append(sketch.histograms())
        pairs = [one for side in found[1:] for one in differences(features, found[0], side).values()]
        chances = holm([one.p for one in pairs])
        count += any(one.psi > 0.2 and p < 0.01 for one, p in zip(pairs, chances, strict=True))
    return count


def test_a_good_random_split_raises_no_alarm() -> None:
    """At a level of 1 % for all features of all splits together; 60 splits, of which 3 are seen once in 400 times."""
    assert false_alarms(60, seed=0) <= 2


@pytest.mark.long
def test_false_alarms_of_good_splits_keep_the_level() -> None:
    """Ten are expected of a thousand; more than twenty are seen once in a thousand times."""
    assert false_alarms(1000, seed=1) <= 20


def test_what_is_not_there_is_not_compared() -> None:
    feature = Feature(column="x", name="x", kind="numbers", edges=(0.0, 1.0))
    nothing, some = Histogram(samples=5, bins=(0, 0, 0)), Histogram(samples=5, bins=(1, 3, 1))
    assert differences((feature,), {"x": nothing}, {"x": some}) == {}
    assert differences((feature,), {}, {"x": some}) == {}
