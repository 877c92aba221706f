from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]

from pipeline.data_checks.profile import Feature, Histogram, HistogramBuilder, choose_features
from pipeline.data_checks.rules import differences, ks_p_value, psi
from pipeline.data_checks.run_checks import report_results, write_checks
from pipeline.statistics.significance import holm
from pipeline.system.errors import DataError

from .conftest import Check, Forecasts, alarms, alarms_of, normal


def compare(before: Any, after: Any) -> Any:
    """Return the largest difference of one column between two sets."""
    first, second = ({"x": torch.as_tensor(side)} for side in (before, after))
    features = choose_features(first)
    sides = []
    for side in (first, second):
        sketch = HistogramBuilder(features)
        sketch.add(side)
        sides.append(sketch.histograms())
    return max(differences(features, *sides).values(), key=lambda one: one.psi)


def test_stability_index_matches_the_definition() -> None:
    a, b = np.array([1000.0, 2000.0, 7000.0]), np.array([2000.0, 2000.0, 6000.0])
    p, q = a / a.sum(), b / b.sum()
    assert psi(a, b) == pytest.approx(float(((q - p) * np.log(q / p)).sum()), abs=1e-3)
    assert psi(a, 3 * a) == pytest.approx(0, abs=1e-6)
    assert np.isfinite(psi(np.array([10.0, 0.0]), np.array([0.0, 10.0]))), "an empty bin is no infinity"


@pytest.mark.parametrize(("n", "m", "shift"), [(40, 60, 0.0), (40, 60, 0.5), (300, 200, 0.2), (2000, 1500, 0.05)])
def test_ks_p_value_agrees_with_scipy(n: int, m: int, shift: float) -> None:
    generator = np.random.default_rng(3)
    a, b = generator.standard_normal(n), generator.standard_normal(m) + shift
    known = stats.ks_2samp(a, b, method="exact")
    assert ks_p_value(float(known.statistic), n, m) == pytest.approx(float(known.pvalue), abs=0.03)


def test_histogram_preserves_most_of_the_ks_distance() -> None:
    generator = np.random.default_rng(4)
    a, b = generator.standard_normal(4000), generator.standard_normal(3000) + 0.3
    found, known = compare(a, b), stats.ks_2samp(a, b)
    distance = float(found.description.split()[2].rstrip(","))
    assert known.statistic - 1 / 32 < distance <= known.statistic + 1e-3
    assert found.p < 1e-10


@pytest.mark.parametrize("kind", ["normal", "heavy", "constant", "few values", "flags", "mostly nothing"])
def test_samples_of_one_distribution_do_not_differ(kind: str) -> None:
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
def test_samples_of_other_distributions_differ(before: Any, after: Any) -> None:
    found = compare(before, after)
    assert found.psi > 0.2
    assert found.p < 1e-6


def texts(seed: int, count: int, topics: int, first: int = 0) -> Any:
    """Return texts of one topic each, so that its tokens occur together."""
    generator = np.random.default_rng(seed)
    topic = generator.integers(first, first + topics, count)[:, None]
    return topic * 20 + generator.integers(0, 20, (count, 64))


def test_tokens_of_one_text_are_not_independent() -> None:
    """Ten more texts of a topic among 200 are chance, although their 640 tokens would not be if independent."""
    chances = [compare(texts(seed, 300, 10), texts(seed + 100, 100, 10)).p for seed in range(40)]
    assert sum(chance < 0.05 for chance in chances) <= 6
    assert compare(texts(1, 300, 10), texts(2, 100, 10, first=4)).p < 1e-6


def false_alarms(trials: int, seed: int) -> int:
    """Return how many random splits of clean data with 20 columns of every kind raise an alarm."""
    generator = np.random.default_rng(seed)
    count = 0
    for _ in range(trials):
        columns = {f"c{i}": torch.as_tensor(generator.standard_normal(400) ** (1 + i % 3)) for i in range(14)}
        columns |= {f"i{i}": torch.as_tensor(generator.integers(0, 3 + i, 400)) for i in range(6)}
        train = {name: column[:240] for name, column in columns.items()}
        features = choose_features(train)
        found = []
        for part in (slice(0, 240), slice(240, 320), slice(320, 400)):
            sketch = HistogramBuilder(features)
            sketch.add({name: column[part] for name, column in columns.items()})
            found.append(sketch.histograms())
        pairs = [one for side in found[1:] for one in differences(features, found[0], side).values()]
        chances = holm([one.p for one in pairs])
        count += any(one.psi > 0.2 and p < 0.01 for one, p in zip(pairs, chances, strict=True))
    return count


@pytest.mark.parametrize(("trials", "most"), [(60, 2), pytest.param(300, 9, marks=pytest.mark.long)])
def test_random_splits_raise_few_alarms(trials: int, most: int) -> None:
    """The level is 1% for all features together; more than so many alarms occur once in 400 times, or in 1,000."""
    assert false_alarms(trials, seed=trials > 60) <= most


def test_empty_histograms_are_not_compared() -> None:
    feature = Feature(column="x", name="x", kind="numbers", edges=(0.0, 1.0))
    nothing, some = Histogram(samples=5, bins=(0, 0, 0)), Histogram(samples=5, bins=(1, 3, 1))
    assert differences((feature,), {"x": nothing}, {"x": some}) == {}
    assert differences((feature,), {}, {"x": some}) == {}


GOOD = {"x": normal(300, 4), "label": np.arange(300) % 3}
FEWER = {"x": normal(120, 4, seed=1), "label": np.arange(120) % 3}


def test_good_data_passes_every_check(check: Check) -> None:
    found = check(GOOD, FEWER, classes="abc")
    assert alarms(found) == []
    assert {one.check for one in found.results} == {"schema", "missing", "range", "drift", "labels", "copies", "near"}
    report_results(found)


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        (FEWER["x"].astype(np.float64), "type float64, not float32"),
        (normal(120, 5), "shape [5] of a sample, not [4]"),
        (normal(120, 4, 1), "shape [4, 1] of a sample, not [4]"),
    ],
)
def test_other_type_or_shape_stops_the_pipeline(check: Check, x: Any, problem: str) -> None:
    found = check(GOOD, {**FEWER, "x": x}, validation=FEWER, classes="abc")
    assert [one.sentence() for one in alarms_of(found, "schema")] == [
        f"test.x: {problem} as in train.x; to fix it: make data() return the same for both"
    ]
    with pytest.raises(DataError, match=r"data: test\.x: "):
        report_results(found)


def gap(share: float) -> Any:
    x = normal(200, 4)
    x.reshape(-1)[: int(share * x.size)] = np.nan
    return {"x": x, "label": np.arange(200) % 3}


def test_missing_number_stops_the_pipeline_with_a_fix(check: Check) -> None:
    found = check(gap(0.01), FEWER, classes="abc")
    (finding,) = alarms_of(found, "missing")
    assert finding.where == "train.x[3]"
    assert finding.detail.startswith(
        "1% of the numbers are NaN or infinite (8 of 800 in x); to fix it: fill or drop them"
    )
    assert "prepare.missing_share=0.01" in finding.detail
    assert alarms_of(check(gap(0.01), FEWER, classes="abc", missing_share=0.01), "missing") == []
    assert alarms_of(check(gap(0.01), FEWER, classes="abc", missing=False), "missing") == [], (
        "YAML reads `off` as false"
    )


def test_the_suggested_share_accepts_the_worst_split(check: Check) -> None:
    splits = [{"x": np.where(normal(n, 1) > limit, np.nan, 1.0)} for n, limit in ((300, 1.5), (120, 0.5), (90, 1.0))]
    findings = alarms_of(check(*splits), "missing")
    assert {finding.where for finding in findings} == {"train.x", "test.x", "validation.x"}
    (share,) = {re.findall(r"prepare.missing_share=([\d.]+)", finding.detail)[0] for finding in findings}
    assert alarms_of(check(*splits, missing_share=float(share)), "missing") == []


@pytest.mark.parametrize("ranks", [True, False])
def test_query_ids_are_not_labels(check: Check, ranks: bool) -> None:
    """With actual(), only its column is a label; without it, an integer with many values counts as an id."""
    relevance = np.arange(2400, dtype=np.float32) % 4

    def items(seed: int, count: int) -> dict[str, Any]:
        queries = np.arange(count) // (1 if ranks else 8)
        return {"x": normal(count, 3, seed=seed), "relevance": relevance[:count], "query": queries}

    found = check(items(0, 2400), items(1, 600), inputs=["x"], ranks=ranks)
    assert alarms_of(found, "labels") == []
    assert "query" not in {feature.column for feature in found.profile.features}
    biased = {**items(1, 600), "relevance": relevance[:600] * 0}
    assert alarms_of(check(items(0, 2400), biased, inputs=["x"], ranks=ranks), "labels")


def test_number_that_is_always_missing_is_reported_by_itself(check: Check) -> None:
    empty = {"x": np.full((50, 4), np.nan, np.float32), "label": np.arange(50) % 3}
    (finding,) = alarms_of(check(GOOD, empty, validation=FEWER, classes="abc"), "missing")
    assert finding.detail.startswith("every number is NaN or infinite")
    x = normal(50, 100)
    x[:, 7] = np.nan
    found = check({"x": normal(300, 100)}, {"x": x}, {"x": normal(90, 100)}, missing_share=0.05)
    (finding,) = alarms_of(found, "missing")
    assert (finding.where, finding.value) == ("test.x[7]", 1.0)


def test_other_scale_is_reported_both_ways_and_outliers_are_not(check: Check) -> None:
    pixels = np.abs(normal(300, 1))
    (larger,) = alarms_of(check({"x": pixels}, {"x": pixels[:120] * 255}, validation={"x": pixels[120:]}), "range")
    assert larger.where == "test.x"
    assert "latter values are outside the former range; to fix it: look for a change of unit, scale" in larger.detail
    (smaller, *_) = alarms_of(check({"x": pixels * 255}, {"x": pixels[:120]}), "range")
    assert "former values are outside the latter range" in smaller.detail
    outlier = pixels[:120].copy()
    outlier[0] = 1e9
    assert alarms_of(check({"x": pixels}, {"x": outlier}), "range") == []


def test_changed_labels_are_reported_by_class(check: Check) -> None:
    skewed = {**FEWER, "label": np.where(np.arange(120) % 4 == 0, 2, 0)}
    (finding,) = alarms_of(check(GOOD, skewed, validation=FEWER, classes=("cat", "dog", "owl")), "labels")
    assert finding.where == "test.class label"
    assert "other labels than in train (" in finding.detail
    assert "dog: 33.33% → 0.00%" in finding.detail or "cat: 33.33% → 75.00%" in finding.detail
    assert "prepare.drift=off" in finding.detail


def test_columns_that_are_not_inputs_are_labels(check: Check) -> None:
    train = {"x": normal(300, 4), "target": normal(300)}
    test = {"x": normal(120, 4, seed=1), "target": normal(120) + 3}
    found = check(train, test, inputs=["x"])
    assert {one.where for one in alarms_of(found, "labels")} == {"validation.target", "test.target"}
    assert alarms_of(found, "drift") == []


def test_each_horizon_of_a_forecast_is_a_label(check: Check) -> None:
    train = {"x": normal(300, 4), "future": normal(300, 5), "other": normal(300)}
    test = {"x": normal(120, 4, seed=1), "future": normal(120, 5, seed=2), "other": normal(120) + 3}
    test["future"][:, 3] += 2
    found = check(train, test, inputs=["x"], kind=Forecasts)
    assert {one.where for one in alarms_of(found, "labels")} == {"validation.true value[3]", "test.true value[3]"}


def test_drift_is_reported_per_feature_unless_off_or_ignored(check: Check) -> None:
    shifted = {**FEWER, "x": FEWER["x"] + np.array([0, 0, 2, 0], np.float32)}
    found = check(GOOD, shifted, validation=FEWER, classes="abc")
    assert [one.where for one in alarms_of(found, "drift")] == ["test.x[2]"]
    assert alarms_of(check(GOOD, shifted, classes="abc", drift="off"), "drift") == []
    missing = {**FEWER, "x": np.full((120, 4), np.nan)}
    assert alarms(check(GOOD, missing, validation=FEWER, classes="abc", ignore=["x"])) == []
    with pytest.raises(DataError, match=r"data: test\.x\[2\]: other values than in train"):
        report_results(check(GOOD, shifted, validation=FEWER, classes="abc", drift="error"))


def test_all_results_are_written_and_the_first_are_printed(
    check: Check, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {f"c{i}": normal(200, seed=i) for i in range(9)}
    found = check(many, {name: column[:90] + 3 for name, column in many.items()}, copies="off")
    write_checks(found, tmp_path)
    rows = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert len([row for row in rows if row["level"] == "warn"]) == 36
    assert {frozenset(row) for row in rows} == {
        frozenset({"check", "where", "level", "value", "limit", "detail", "against"})
    }
    report_results(found)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "warning: 31 more results like these are in prepare/checks.json"


def test_inputs_with_one_value_in_every_split_are_named(check: Check) -> None:
    def sides(constant: Any, count: Any) -> list[Any]:
        columns = {"x": normal(200, 4), "constant": np.full(200, constant), "mask": np.ones((200, 3))}
        columns["tokens"] = np.random.default_rng(0).integers(0, 9, (200, 5)) * [0, 1, 1, 1, 1]
        columns["x"][:, 1], columns["flag"] = 2, np.arange(200) < count
        return [{name: column[part] for name, column in columns.items()} for part in (slice(100), slice(100, 200))]

    (warning,) = alarms_of(check(*sides(7.0, 200)), "constant")
    assert (warning.level, warning.value) == ("warn", 3)
    assert warning.detail.startswith("x[1], constant, flag: the same value in every sample")
    (warning,) = alarms_of(check(*sides(7.0, 90), ignore=["constant"]), "constant")
    assert warning.detail.startswith("x[1]: "), "the flag varies in train"
    assert alarms_of(check(*sides(7.0, 200), columns="off"), "constant") == []
