"""Numbers that the report draws of predictions."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, precision_score, recall_score, roc_auc_score

from pipeline.evaluate.__main__ import figures_body


def test_error_is_split_by_deciles_of_the_true_value() -> None:
    actual = np.arange(1000.0)
    error = np.where(actual < 100, 5.0, -1.0)
    body = figures_body({"actual": actual, "candidate.predicted": actual + error, "baseline.predicted": actual}, None)
    regression = json.loads(json.dumps(body))["regression"]
    first, *others = regression["deciles"]
    assert first == {"low": 0, "high": 99, "samples": 100, "mae": 5, "bias": 5, "baseline_mae": 0}
    assert [(decile["mae"], decile["bias"]) for decile in others] == [(1, -1)] * 9
    assert len(regression["points"]) == 400
    assert all(predicted - value in (5, -1) for value, predicted in regression["points"])
    assert sum(regression["residuals"]["counts"]) == 1000
    assert regression["residuals"]["mean"] == pytest.approx(-0.4)


@pytest.mark.parametrize("predicted", [[1.0, np.nan, 3.0], [1.0, 2.0, 3.0], [np.nan] * 3, [1e300, -1e300, 0.0]])
def test_few_samples_and_values_that_are_not_finite_are_drawn(predicted: list[float]) -> None:
    columns = {"actual": np.array([1.0, 2, 3]), "candidate.predicted": np.array(predicted)}
    regression = figures_body(columns, None)["regression"]
    json.dumps(regression, allow_nan=False)
    assert regression["not_finite"] == int(np.isnan(predicted).sum())
    assert len(regression["points"]) == len(regression["deciles"]) == 3 - regression["not_finite"]


def test_queries_with_scores_that_are_not_finite_are_left_out() -> None:
    columns = {
        "query": np.array([1, 1, 2, 2]),
        "actual": np.array([0.0, 1, 0, 1]),
        "candidate.predicted": np.array([3.0, np.nan, 2.0, 1.0]),
    }
    ranking = figures_body(columns, None)["ranking"]
    assert [(row["query"], row["first_relevant_rank"]) for row in ranking["worst"]] == [(2, 2)]


def test_extreme_residuals_are_counted_in_the_outer_bins() -> None:
    actual = np.zeros(1000)
    predicted = np.random.default_rng(0).normal(size=1000)
    predicted[7] = 1e6
    residuals = figures_body({"actual": actual, "candidate.predicted": predicted}, None)["regression"]["residuals"]
    assert residuals["high"] < 4
    assert (residuals["beyond"], sum(residuals["counts"])) == (10, 1000)


def test_queries_with_relevant_items_are_listed_by_ndcg() -> None:
    columns = {
        "query": np.array([7, 7, 7, 3, 3, 9, 9]),
        "actual": np.array([0.0, 0, 1, 2, 0, 0, 0]),
        "candidate.predicted": np.array([3.0, 2, 1, 5, 4, 1, 2]),
        "baseline.predicted": np.array([1.0, 2, 3, 4, 5, 1, 2]),
    }
    ranking = figures_body(columns, None)["ranking"]
    assert (ranking["queries"], ranking["without_relevant"]) == (3, 1)
    assert [(row["query"], row["items"], row["relevant"]) for row in ranking["worst"]] == [(7, 3, 1), (3, 2, 1)]
    assert [(row["ndcg"], row["baseline"]) for row in ranking["worst"]] == [(0.5, 1), (1, pytest.approx(0.6309, 1e-3))]
    assert [row["first_relevant_rank"] for row in ranking["worst"]] == [3, 1]
    assert (sum(ranking["histogram"]["candidate"]), ranking["histogram"]["candidate"][-1]) == (2, 1)
    json.dumps(ranking, allow_nan=False)


def test_curves_of_two_classes_agree_with_scikit_learn_for_both_models() -> None:
    random = np.random.default_rng(0)
    actual = (random.random(3000) < 0.2).astype(np.int64)
    columns = {"actual": actual}
    for owner, noise in (("candidate", 0.2), ("baseline", 0.5)):
        positive = (actual * 0.4 + noise * random.random(3000)).clip(0, 1).round(2)  # with ties
        columns[f"{owner}.probabilities"] = np.stack([1 - positive, positive], axis=1).astype(np.float32)
        columns[f"{owner}.predicted"] = (positive > 0.3).astype(np.int64)
    body = json.loads(json.dumps(figures_body(columns, ["no", "yes"])))["classification"]
    assert [(curve["model"], curve["class"]) for curve in body["curves"]] == [("candidate", "yes"), ("baseline", "yes")]
    for curve in body["curves"]:
        scores = columns[f"{curve['model']}.probabilities"][:, 1]
        predicted = columns[f"{curve['model']}.predicted"]
        assert curve["auc"] == pytest.approx(roc_auc_score(actual, scores))
        assert curve["average_precision"] == pytest.approx(average_precision_score(actual, scores))
        assert curve["decision"]["tpr"] == pytest.approx(recall_score(actual, predicted))
        assert curve["decision"]["precision"] == pytest.approx(precision_score(actual, predicted))
        assert (curve["roc"][0], curve["roc"][-1]) == ([0, 0], [1, 1])
        assert curve["roc"] == sorted(curve["roc"])
        assert curve["pr"][-1] == [1, pytest.approx(actual.mean(), abs=1e-4)]
        assert max(len(curve["roc"]), len(curve["pr"])) <= 152


def test_most_frequent_classes_have_a_curve_against_the_rest() -> None:
    actual = np.repeat(np.arange(14), np.arange(14) + 1)
    probabilities = np.full((len(actual), 14), 0.01)
    probabilities[np.arange(len(actual)), actual] = 0.87
    columns = {"actual": actual, "candidate.predicted": actual, "candidate.probabilities": probabilities}
    curves = figures_body(columns, [f"c{i}" for i in range(14)])["classification"]["curves"]
    assert [curve["class"] for curve in curves] == [f"c{i}" for i in range(4, 14)]
    assert {curve["auc"] for curve in curves} == {1.0}
    one_class = {name: values[:1] for name, values in columns.items()}
    assert figures_body(one_class, [f"c{i}" for i in range(14)]) == {}, "no curve of a single class"
    assert figures_body({"actual": actual, "candidate.predicted": actual}, ["a", "b"]) == {}, "no probabilities"
    assert figures_body({"candidate.loss": np.zeros(3)}, None) == {}, "no labels"
