from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]

from pipeline.contract.errors import DataError
from pipeline.contract.statistics.significance import holm
from pipeline.data_checks.profile import Feature, Histogram, Sketch, lay_out
from pipeline.data_checks.rules import differences, kolmogorov, psi
from pipeline.data_checks.run_checks import tell, write_look

from .conftest import LookAt, alarms, normal, told


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


GOOD = {"x": normal(300, 4), "label": np.arange(300) % 3}
FEWER = {"x": normal(120, 4, seed=1), "label": np.arange(120) % 3}


def test_good_data_pass_every_check_and_each_says_so(look_at: LookAt) -> None:
    found = look_at(GOOD, FEWER, classes="abc")
    assert alarms(found) == []
    assert {one.check for one in found.findings} == {"schema", "missing", "range", "drift", "labels"}
    tell(found)


@pytest.mark.parametrize(
    ("x", "told_of_it"),
    [
        (FEWER["x"].astype(np.float64), "type float64, not float32"),
        (normal(120, 5), "shape [5] of a sample, not [4]"),
        (normal(120, 4, 1), "shape [4, 1] of a sample, not [4]"),
    ],
)
def test_splits_of_another_type_or_shape_stop_the_road(look_at: LookAt, x: Any, told_of_it: str) -> None:
    found = look_at(GOOD, {**FEWER, "x": x}, validation=FEWER, classes="abc")
    assert [one.sentence() for one in told(found, "schema")] == [
        f"test.x: {told_of_it} as in train.x; make data() give both alike"
    ]
    with pytest.raises(DataError, match=r"data: test\.x: "):
        tell(found)


def gap(share: float) -> Any:
    x = normal(200, 4)
    x.reshape(-1)[: int(share * x.size)] = np.nan
    return {"x": x, "label": np.arange(200) % 3}


def test_a_missing_number_stops_the_road_and_says_how_many_and_how_to_mend_it(look_at: LookAt) -> None:
    found = look_at(gap(0.01), FEWER, classes="abc")
    (finding,) = told(found, "missing")
    assert finding.where == "train.x[3]"
    assert finding.detail.startswith("1% of the numbers are NaN or infinite (8 of 800 in x); fill or drop them")
    assert "prepare.missing_share=0.01" in finding.detail
    assert told(look_at(gap(0.01), FEWER, classes="abc", missing_share=0.01), "missing") == []
    assert told(look_at(gap(0.01), FEWER, classes="abc", missing=False), "missing") == [], "YAML reads `off` as false"


def test_a_column_with_nothing_in_it_is_named_as_such(look_at: LookAt) -> None:
    empty = {"x": np.full((50, 4), np.nan, np.float32), "label": np.arange(50) % 3}
    (finding,) = told(look_at(GOOD, empty, validation=FEWER, classes="abc"), "missing")
    assert finding.detail.startswith("every number is NaN or infinite")


def test_one_number_of_many_that_is_always_missing_is_no_small_part(look_at: LookAt) -> None:
    x = normal(50, 100)
    x[:, 7] = np.nan
    (finding,) = told(look_at({"x": normal(300, 100)}, {"x": x}, {"x": normal(90, 100)}, missing_share=0.05), "missing")
    assert (finding.where, finding.value) == ("test.x[7]", 1.0)


def test_another_scale_is_another_range_both_ways_and_an_outlier_is_none(look_at: LookAt) -> None:
    pixels = np.abs(normal(300, 1))
    (larger,) = told(look_at({"x": pixels}, {"x": pixels[:120] * 255}, validation={"x": pixels[120:]}), "range")
    assert larger.where == "test.x"
    assert "look for another unit, scale or encoding" in larger.detail
    assert told(look_at({"x": pixels * 255}, {"x": pixels[:120]}, leaks="warn"), "range")
    outlier = pixels[:120].copy()
    outlier[0] = 1e9
    assert told(look_at({"x": pixels}, {"x": outlier}), "range") == []


def test_other_labels_are_told_by_the_class_that_moved(look_at: LookAt) -> None:
    skewed = {**FEWER, "label": np.where(np.arange(120) % 4 == 0, 2, 0)}
    (finding,) = told(look_at(GOOD, skewed, validation=FEWER, classes=("cat", "dog", "owl")), "labels")
    assert finding.where == "test.class label"
    assert "other labels than in train (" in finding.detail
    assert "dog: 33.33% → 0.00%" in finding.detail or "cat: 33.33% → 75.00%" in finding.detail
    assert "prepare.labels=off" in finding.detail


def test_what_a_task_without_classes_learns_is_its_label(look_at: LookAt) -> None:
    train = {"x": normal(300, 4), "target": normal(300)}
    test = {"x": normal(120, 4, seed=1), "target": normal(120) + 3}
    found = look_at(train, test, inputs=["x"])
    assert {one.where for one in told(found, "labels")} == {"validation.target", "test.target"}
    assert told(found, "drift") == []


def test_other_inputs_are_told_feature_by_feature(look_at: LookAt) -> None:
    shifted = FEWER["x"] + np.array([0, 0, 2, 0], np.float32)
    found = look_at(GOOD, {**FEWER, "x": shifted}, validation=FEWER, classes="abc")
    assert [one.where for one in told(found, "drift")] == ["test.x[2]"]
    assert told(look_at(GOOD, {**FEWER, "x": shifted}, classes="abc", drift="off"), "drift") == []
    strict = look_at(GOOD, {**FEWER, "x": shifted}, validation=FEWER, classes="abc", drift="error")
    with pytest.raises(DataError, match=r"data: test\.x\[2\]: other values than in train"):
        tell(strict)


def test_an_ignored_column_is_not_looked_at(look_at: LookAt) -> None:
    test = {**FEWER, "x": np.full((120, 4), np.nan)}
    assert alarms(look_at(GOOD, test, validation=FEWER, classes="abc", ignore=["x"])) == []


def test_all_that_was_found_is_written_and_the_first_few_are_printed(
    look_at: LookAt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {f"c{i}": normal(200, seed=i) for i in range(9)}
    found = look_at(many, {name: column[:90] + 3 for name, column in many.items()}, range="off")
    write_look(found, tmp_path)
    rows = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert len([row for row in rows if row["level"] == "warn"]) == 18
    assert {frozenset(row) for row in rows} == {
        frozenset({"check", "where", "level", "value", "limit", "detail", "against"})
    }
    tell(found)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "warning: 13 more of the kind, in prepare/checks.json"


def test_a_feature_that_never_changes_is_told_in_passing(look_at: LookAt) -> None:
    x = normal(100, 4)
    x[:, 1] = 2
    found = look_at({"x": x[:60]}, {"x": x[60:]})
    assert "the same in all samples of train: x[1]" in found.notes
    assert alarms(found) == []
