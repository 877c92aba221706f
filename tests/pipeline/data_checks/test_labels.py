from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

from pipeline.data_checks.run_checks import report_results
from pipeline.system.errors import DataError

from .conftest import Check, Forecasts, alarms_of, normal


def split(rows: Any, labels: Any, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split at random into 60 % training, 20 % validation and 20 % test."""
    order = np.random.default_rng(seed).permutation(len(rows))
    cuts = np.split(order, [int(0.6 * len(rows)), int(0.8 * len(rows))])
    train, validation, test = ({"x": rows[cut], "label": labels[cut]} for cut in cuts)
    return train, test, validation


def digits(seed: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    data = load_digits()
    return split((data.images[:, None] / 16).astype(np.float32), data.target, seed)


def clusters(count: int = 600, seed: int = 0) -> tuple[Any, Any]:
    labels = np.random.default_rng(seed).integers(0, 3, count)
    return normal(count, 6, seed=seed + 1) + 2 * np.eye(6, dtype=np.float32)[labels], labels


ORDERS = {
    "shifted by one": lambda labels: (labels + 1) % 10,
    "two swapped": lambda labels: np.array([0, 1, 2, 8, 4, 5, 6, 7, 3, 9])[labels],
    "reversed": lambda labels: 9 - labels,
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_renumbered_classes_stop_the_pipeline(check: Check, order: Any) -> None:
    train, test, validation = digits()
    assert alarms_of(check(train, test, validation, classes="0123456789"), "label_set") == []
    found = check(train, {**test, "label": order(test["label"])}, validation, classes="0123456789")
    (finding,) = alarms_of(found, "label_set")
    assert (finding.level, finding.where) == ("error", "test.labels")
    assert "by their inputs, the test labels are numbered differently than in training" in finding.detail
    with pytest.raises(DataError, match="number the labels alike in all splits"):
        report_results(found)


def test_labels_missing_in_training_stop_unless_they_are_rare(check: Check) -> None:
    train, test, validation = split(*clusters())
    kept = train["label"] != 2
    found = check({name: side[kept] for name, side in train.items()}, test, validation, classes="abc")
    alarms = alarms_of(found, "label_set")
    assert {(one.where, one.level) for one in alarms} >= {("validation.labels", "error"), ("test.labels", "error")}
    assert "have a label that no training sample has (c)" in alarms[0].detail
    test["label"][0] = 3
    assert alarms_of(check(train, test, validation, classes="abcd"), "label_set") == []


@pytest.mark.parametrize("factor", [1000, 57.29578, 255, 1 / 255, 0.001], ids=str)
def test_another_unit_stops_the_pipeline(check: Check, factor: float) -> None:
    train, test, validation = split(*clusters())
    rows = test["x"].copy()
    rows[:, 2] *= factor
    found = alarms_of(check(train, {**test, "x": rows}, validation, classes="abc"), "range")
    assert [(one.where, one.level) for one in found] == [("test.x", "error")]
    assert "look for a change of unit, scale or encoding" in found[0].detail


def test_trend_is_drift_and_not_another_unit(check: Check) -> None:
    time = np.arange(600, dtype=np.float32)[:, None]
    rows = np.concatenate([normal(600, 12), time], axis=1)
    found = check({"x": rows[:400]}, {"x": rows[500:]}, {"x": rows[400:500]})
    assert {one.level for one in alarms_of(found, "range")} == {"warn"}


def leaky(labels: Any, noise: float = 0.0) -> Any:
    return (labels + noise * normal(len(labels), seed=9)).astype(np.float32)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_column_that_predicts_the_label_stops_the_pipeline(check: Check, noise: float) -> None:
    rows, labels = clusters()
    rows = np.column_stack([0.2 * rows, leaky(labels, noise)]).astype(np.float32)
    (finding,) = alarms_of(check(*split(rows, labels), classes="abc"), "leak")
    assert (finding.where, finding.level) == ("train.x[6]", "error")
    assert "this column alone predicts the label with a score of 1.000" in finding.detail
    assert "prepare.leaks=warn" in finding.detail
    (warning,) = alarms_of(check(*split(rows, labels), classes="abc", leaks="warn"), "leak")
    assert warning.level == "warn"


def test_separable_data_are_no_leak(check: Check) -> None:
    iris = load_iris()
    is_setosa = (iris.target == 0).astype(np.int64)
    assert alarms_of(check(*split(iris.data, is_setosa), classes="ab", leaks="warn"), "leak") == []
    only = (normal(600) > 0).astype(np.int64)
    assert alarms_of(check(*split(normal(600, 1), only), classes="ab"), "leak") == [], "a task of one column"
    rows = normal(900, 5)
    threshold = (rows[:, 0] > 0.4).astype(np.int64)
    assert alarms_of(check(*split(rows, threshold), classes="ab"), "leak") == [], "a threshold of one column"


RULES = {
    "a sum": lambda x: x[:, 0] + x[:, 1] > 1,
    "a weighted sum in three classes": lambda x: np.digitize(2 * x[:, 0] + 3 * x[:, 1], [2, 3]),
    "two flags that differ": lambda x: x[:, 4] != x[:, 5],
    "a product": lambda x: (x[:, 0] - 0.5) * (x[:, 1] - 0.5) > 0,
    "two thresholds": lambda x: (x[:, 0] > 0.5) & (x[:, 1] > 0.3),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_labels_that_follow_from_two_columns_are_a_doubt(check: Check, rule: Any) -> None:
    generator = np.random.default_rng(0)
    rows = np.column_stack([generator.random((1000, 4)), generator.integers(0, 2, (1000, 3))]).astype(np.float32)
    labels = rule(rows).astype(np.int64)
    found = check(*split(rows, labels), classes="abc")
    (doubt,) = alarms_of(found, "formula")
    assert doubt.level == "warn"
    names = "x[4], x[5]" if rule is RULES["two flags that differ"] else "x[0], x[1]"
    assert doubt.detail.startswith(f"the labels follow exactly from {names}; if they are computed from the inputs")
    assert alarms_of(check(*split(rows, labels), classes="abc", leaks="off"), "formula") == []
    wrong = np.where(generator.random(1000) < 0.02, (labels + 1) % 2, labels)
    assert alarms_of(check(*split(rows, wrong), classes="abc"), "formula") == [], "two of a hundred labels differ"


@pytest.mark.parametrize(("noise", "names"), [(0.0, "x[0], x[1]"), (0.1, "")])
def test_numbers_that_are_a_sum_of_columns_are_a_doubt(check: Check, noise: float, names: str) -> None:
    rows = normal(1000, 6)
    target = rows[:, 0] + rows[:, 1] + np.float32(noise) * normal(1000, seed=1)
    sides = [{"x": rows[part], "future": target[part]} for part in (slice(600), slice(800, 1000), slice(600, 800))]
    found = check(*sides, inputs=["x"], kind=Forecasts)
    assert [names in one.detail for one in alarms_of(found, "formula")] == [True] * bool(names)


def test_samples_with_many_labels_are_not_compared_with_their_inputs(check: Check) -> None:
    words = np.random.default_rng(0).integers(1, 90, (300, 12))
    found = check(*split(words, words % 3), classes="abc")
    assert alarms_of(found, "label_set") == alarms_of(found, "leak") == []


def clean_sets() -> dict[str, Any]:
    generator = np.random.default_rng(3)
    skewed = np.exp(1.5 * generator.standard_normal((800, 6))).astype(np.float32)
    topic = generator.integers(0, 4, 700)
    words = np.minimum(generator.zipf(1.3, (700, 40)), 900) + np.where(
        generator.random((700, 40)) < 0.3, 1000 + 50 * topic[:, None], 0
    )
    sound = np.sin(np.arange(800) * generator.uniform(0.01, 0.1, (500, 1))) + generator.standard_normal((500, 800))
    pictures = np.repeat(np.repeat(generator.random((600, 8, 8)), 3, 1), 3, 2).astype(np.float32)
    flags = generator.integers(0, 2, (600, 8)).astype(np.float32)
    bunch = {"iris": load_iris(), "wine": load_wine(), "cancer": load_breast_cancer(), "digits": load_digits()}
    return {
        **{name: (data.data.astype(np.float32), data.target) for name, data in bunch.items()},
        "diabetes": (load_diabetes().data.astype(np.float32), None),
        "skewed": (skewed, (skewed[:, 0] * skewed[:, 1] > 1).astype(np.int64)),
        "text": (words.astype(np.int64), topic),
        "sequence": (sound.astype(np.float32), generator.integers(0, 2, 500)),
        "pictures": (pictures, (pictures.mean((1, 2)) > 0.5).astype(np.int64)),
        "flags and a number": (
            np.column_stack([flags, generator.standard_normal(600)]).astype(np.float32),
            flags.sum(1).astype(np.int64),
        ),
    }


FOLLOWING = ("skewed", "flags and a number")  # whose labels are computed from the inputs


def stops(check: Check, seeds: range) -> tuple[dict[str, int], dict[str, int]]:
    """Return how many splits of each clean data set have a stopping result, or a near copy."""
    stopped, copies = {}, {}
    for name, (rows, labels) in clean_sets().items():
        classes = None if labels is None else [str(i) for i in range(int(labels.max()) + 1)]
        stopped[name] = copies[name] = 0
        for seed in seeds:
            sides = split(rows, np.zeros(len(rows), np.int64) if labels is None else labels, seed)
            if labels is None:
                sides = tuple({"x": side["x"]} for side in sides)  # type: ignore[assignment]
            found = check(*sides, classes=classes, leaks="warn")
            doubts = ("leak",) if name in FOLLOWING else ("leak", "formula")
            stopped[name] += any(
                one.level == "error" or (one.check in doubts and one.level != "ok") for one in found.results
            )
            copies[name] += bool(alarms_of(found, "near"))
    return stopped, copies


def test_clean_data_sets_do_not_stop(check: Check) -> None:
    stopped, _ = stops(check, range(1))
    assert not any(stopped.values()), stopped


@pytest.mark.long
def test_clean_data_sets_rarely_stop_in_many_splits(check: Check) -> None:
    stopped, copies = stops(check, range(20))
    print(stopped, copies)
    assert sum(stopped.values()) < 2, stopped
    assert sum(copies.values()) < 4, copies
