from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy.stats import spearmanr  # type: ignore[import-untyped]
from sklearn.metrics import (
    confusion_matrix,
    mean_absolute_error,
    ndcg_score,
    precision_recall_fscore_support,
    r2_score,
    roc_auc_score,
)

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.gate import decide
from pipeline.evaluate.results import Results, metrics_body
from pipeline.statistics.metrics import check_directions, class_metrics, confusion, query_metrics
from pipeline.statistics.scores import BASELINE, CANDIDATE, Columns
from pipeline.system.errors import ConfigError


def test_confusion_and_ratios_agree_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    actual = generator.integers(4, size=300)
    predicted = np.where(generator.random(300) < 0.7, actual, generator.integers(4, size=300))
    matrix = confusion(actual, predicted, 4)
    assert (matrix == confusion_matrix(actual, predicted)).all()
    expected = precision_recall_fscore_support(actual, predicted)
    for i, row in enumerate(class_metrics(matrix, "abcd").values()):
        assert [row["precision"], row["recall"], row["f1"], row["samples"]] == pytest.approx([e[i] for e in expected])


def test_class_without_samples_and_predictions_has_no_ratios() -> None:
    matrix = confusion(np.array([0, 0, 1]), np.array([0, 1, 1]), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert class_metrics(matrix, "abc")["c"] == {"samples": 0, "precision": None, "recall": None, "f1": None}


CLOSE: dict[str, Any] = {"rule": "non-inferior", "margin": 0.1}


def numbers(samples: int = 120, changed: Columns | None = None) -> Columns:
    """Columns of a regression whose candidate has smaller errors than its baseline."""
    generator = np.random.default_rng(4)
    actual = generator.normal(size=samples)
    found = {
        "candidate.own": np.zeros(samples),
        "candidate.predicted": actual + 0.3 * generator.normal(size=samples),
        "baseline.own": np.zeros(samples),
        "baseline.predicted": actual + 0.6 * generator.normal(size=samples),
        "actual": actual,
    }
    return found | (changed or {})


def results(columns: Columns, classes: tuple[str, ...] | None = None) -> Results:
    return Results(columns, "task", None, classes)


def test_a_metric_of_the_task_may_be_lower_is_better() -> None:
    columns = numbers(changed={"candidate.own": np.full(120, 0.2), "baseline.own": np.full(120, 0.5)})
    config = Evaluate(metric="own", require={"own": 0.3}, **CLOSE)
    body = metrics_body(config, Results(columns, "task", None, None, frozenset({"own"})), "f")
    assert body["lower_is_better"] == ["own", "mae", "rmse"]
    assert body["intervals"]["difference"]["own"]["estimate"] == pytest.approx(0.3)
    for lower, verdict in ((frozenset({"own"}), "pass"), (frozenset[str](), "fail")):
        measured = Results(columns, "task", None, None, lower)
        assert decide(config, measured.measurements(config)).verdict == verdict
    with pytest.raises(ConfigError, match=r"directions of the task: metrics\(\) returns no wer"):
        Results(columns, "task", None, None, frozenset({"wer"})).check(config)


@pytest.mark.parametrize("settings", [{"metric": "wer"}, {"metric": "own", "require": {"wer": 0.3}}])
def test_unknown_metric_in_the_settings_is_a_config_error(settings: dict[str, Any]) -> None:
    columns = numbers(changed={"candidate.own": np.full(120, 0.2), "baseline.own": np.full(120, 0.5)})
    setting = "require" if "require" in settings else "metric"
    with pytest.raises(ConfigError, match=rf"evaluate\.{setting}: the task has no metric wer \(it has own, mae"):
        results(columns).check(Evaluate(**settings, **CLOSE))


@pytest.mark.parametrize(("metric", "shown"), [("rmse", 600.0), ("r2", 0.64), ("mae", 500.0)])
def test_slices_are_in_the_units_of_the_metric(metric: str, shown: float) -> None:
    columns = numbers(samples=400)
    scaled = {name: values * 1000 for name, values in columns.items()}
    scaled["slice.half"] = np.repeat(["first", "second"], 200)
    config = Evaluate(metric=metric, rule="non-inferior", margin=0.1)
    result = results(scaled)
    whole = result.metrics[metric]
    first, second = result.slices(config)
    assert first.baseline == pytest.approx(shown, rel=0.25)
    assert first.difference is not None and second.difference is not None
    mean = (first.difference.estimate + second.difference.estimate) / 2
    assert mean == pytest.approx(whole.better * (whole.value("candidate") - whole.value("baseline")))


class Errors:
    """A task, as far as its metrics matter."""

    directions: ClassVar[dict[str, str]] = {"loss": "lower", "abs_error": "higher"}


@pytest.mark.parametrize("name", ["mae", "val_loss", "Error", "word-error-rate", "rmse"])
def test_metric_named_like_an_error_needs_a_direction(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"returns `{name}`, which reads like an error, .* directions = "):
        check_directions(Errors(), ["accuracy", name])  # type: ignore[arg-type]


def test_declared_or_negated_metric_is_accepted() -> None:
    names = ["accuracy", "loss", "abs_error", "negative_squared_error", "neg_mae", "lossless", "terror"]
    check_directions(Errors(), names)  # type: ignore[arg-type]


def test_regression_metrics_agree_with_scikit_learn_and_scipy() -> None:
    columns = numbers()
    body = metrics_body(Evaluate(metric="rmse", **CLOSE), results(columns), "f")
    actual, predicted = columns["actual"], columns["candidate.predicted"]
    assert body["candidate"]["mae"] == pytest.approx(mean_absolute_error(actual, predicted))
    assert body["candidate"]["r2"] == pytest.approx(r2_score(actual, predicted))
    assert body["candidate"]["spearman"] == pytest.approx(spearmanr(actual, predicted).statistic)
    assert body["lower_is_better"] == ["mae", "rmse"]
    for name in ("mae", "rmse", "r2", "spearman"):
        low, high = body["intervals"]["candidate"][name]
        assert low < body["candidate"][name] < high
        assert body["intervals"]["difference"][name]["low"] > 0, "positive is better, of errors too"


def test_larger_error_is_worse_in_words() -> None:
    swapped = {CANDIDATE: BASELINE, BASELINE: CANDIDATE}
    columns = {
        next((new + name.removeprefix(old) for old, new in swapped.items() if name.startswith(old)), name): values
        for name, values in numbers().items()
    }
    config = Evaluate(metric="mae", rule="non-inferior", margin=0.001)
    verdict = decide(config, results(columns).measurements(config))
    assert re.search(r", worse by \+0\.\d+ \(95% interval \+0\.\d+ to \+0\.\d+\)", verdict.summary)
    assert "worse than the baseline's" in verdict.rules[-1].detail


@pytest.mark.parametrize("metric", ["mae", "rmse", "r2", "spearman"])
def test_any_regression_metric_can_decide(metric: str) -> None:
    config = Evaluate(metric=metric, rule="superior", margin=0.03)
    columns = numbers()
    verdict = decide(config, results(columns).measurements(config))
    assert verdict.verdict == "pass", verdict.summary
    assert ("better by +" in verdict.summary) is (metric in ("mae", "rmse"))
    swapped = columns | {f"{a}.predicted": columns[f"{b}.predicted"] for a, b in
                         (("candidate", "baseline"), ("baseline", "candidate"))}  # fmt: skip
    assert decide(config, results(swapped).measurements(config)).verdict == "fail"


def test_required_error_is_an_upper_limit() -> None:
    for limit, passed in ((0.5, True), (0.1, False)):
        config = Evaluate(metric="rmse", require={"rmse": limit}, **CLOSE)
        rules = {rule.rule: rule for rule in decide(config, results(numbers()).measurements(config)).rules}
        assert rules["require.rmse"].passed is passed


def test_slices_of_an_error_use_the_errors_per_sample() -> None:
    columns = numbers()
    columns["slice.place"] = np.array(["sea"] * 60 + ["air"] * 60)
    columns["candidate.predicted"][:60] += 2.0
    config = Evaluate(metric="rmse", rule="non-inferior", margin=0.1)
    passed = {one.slice: one.passed for one in results(columns).measurements(config).slices}
    assert passed == {"place=sea": False, "place=air": True}
    config = config.model_copy(update={"metric": "spearman"})
    slices = results(columns).measurements(config).slices
    assert [one.judged for one in slices] == [False, False]
    assert "no value per sample" in slices[0].detail


@pytest.mark.parametrize(
    ("changed", "undefined", "why"),
    [
        ({"actual": np.ones(120)}, {"r2", "spearman"}, "all true values are equal"),
        ({"candidate.predicted": np.ones(120)}, {"spearman"}, "all values that the candidate predicts are equal"),
        ({"baseline.predicted": np.ones(120)}, {"spearman"}, "all values that the baseline predicts are equal"),
    ],
)
def test_constant_values_leave_a_metric_undefined(changed: Columns, undefined: set[str], why: str) -> None:
    found = results(numbers(changed=changed))
    config = Evaluate(metric="mae", rule="non-inferior", margin=9.0)
    verdict = decide(config, found.measurements(config))
    assert verdict.verdict == "pass", "it is not the one that decides"
    assert f"spearman is undefined: {why}" in verdict.warnings
    assert set(metrics_body(config, found, "f")["undefined"]) == undefined
    config = Evaluate(metric="spearman", rule="non-inferior", require={"spearman": 0.1})
    verdict = decide(config, found.measurements(config))
    assert {rule.rule for rule in verdict.failures} == {"require.spearman", "non-inferior"}
    assert why in verdict.summary


def test_nan_prediction_is_not_a_finite_metric() -> None:
    columns = numbers()
    columns["candidate.predicted"][5] = np.nan
    config = Evaluate(metric="rmse", **CLOSE)
    verdict = decide(config, results(columns).measurements(config))
    assert verdict.failures[0].detail == "mae, r2, rmse, spearman of the candidate is not a finite number"
    assert metrics_body(config, results(columns), "f")["candidate"]["rmse"] is None


def test_one_sample_decides_nothing() -> None:
    for metric in ("own", "rmse"):
        config = Evaluate(metric=metric, **CLOSE)
        verdict = decide(config, results(numbers(samples=1)).measurements(config))
        assert verdict.verdict == "fail"
        assert "cannot be compared with the baseline" in verdict.failures[-1].detail
        assert "not finite" not in verdict.failures[-1].detail


def test_metric_of_the_task_replaces_a_built_in_one() -> None:
    columns = numbers() | {"candidate.mae": np.full(120, -1.0), "baseline.mae": np.full(120, -2.0)}
    metric = results(columns).metrics["mae"]
    assert not metric.lower
    found = metric.difference(0.95)
    assert found is not None and found.estimate == 1.0


def test_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no metric f1 \(it has own, mae, rmse, r2, spearman\)"):
        results(numbers()).check(Evaluate(metric="f1"))


def ranked() -> Columns:
    generator = np.random.default_rng(1)
    queries = np.repeat(np.arange(40), 6)
    actual = generator.integers(0, 2, size=240).astype(np.float64)
    actual[:6] = 0.0
    actual[6:12] = 1.0
    noise = generator.normal(size=(2, 240))
    return {
        "candidate.own": np.zeros(240), "candidate.predicted": actual + 0.4 * noise[0],
        "baseline.own": np.zeros(240), "baseline.predicted": actual + 3.0 * noise[1],
        "actual": actual, "query": queries,
    }  # fmt: skip


def test_ranking_is_compared_per_query_and_omitted_queries_are_reported() -> None:
    config = Evaluate(metric="ndcg", rule="superior", margin=0.05)
    found = results(ranked())
    assert list(found.metrics) == ["own", "ndcg", "mrr", "auc"]
    measured = found.measurements(config)
    assert measured.comparison is not None
    assert (measured.comparison.unit, measured.comparison.samples) == ("queries", 39)
    verdict = decide(config, measured)
    assert verdict.verdict == "pass", verdict.summary
    assert "ndcg omits 1 of 40 queries, which have no relevant item" in verdict.warnings
    assert "auc omits 3 of 40 queries, which have no relevant or no irrelevant item" in verdict.warnings
    assert "on the same 39 queries" in next(rule.how for rule in verdict.rules if rule.rule == "superior")


def stated(classes: int, present: int) -> Columns:
    """Probabilities of a classifier; the test set has samples of the first so many classes alone."""
    generator = np.random.default_rng(6)
    actual = generator.integers(present, size=200)
    rows = [generator.random((200, classes)) + sure * np.eye(classes)[actual] for sure in (0.6, 0.4)]
    shares = [(one / one.sum(axis=1, keepdims=True)).astype(np.float32) for one in rows]
    found: Columns = {"actual": actual}
    for owner, share in zip(("candidate", "baseline"), shares, strict=True):
        right = (share.argmax(axis=1) == actual).astype(np.float64)
        found |= {f"{owner}.accuracy": right, f"{owner}.predicted": share.argmax(axis=1)}
        found[f"{owner}.probabilities"] = share
    return found


def test_metric_undefined_for_a_class_omits_it() -> None:
    columns = stated(3, 3)
    auc = results(columns, ("a", "b", "c")).metrics["auc"]
    assert auc.candidate is not None
    expected = roc_auc_score(columns["actual"], columns["candidate.probabilities"], multi_class="ovr")
    assert auc.candidate.values(np.ones((1, 200)))[0] == pytest.approx(expected)
    found = results(stated(3, 2), ("a", "b", "c"))
    assert found.metrics["auc"].note == "auc omits c: no sample of it in the test set"
    config = Evaluate(**CLOSE)
    assert any("class=c" in warning for warning in decide(config, found.measurements(config)).warnings)
    body = metrics_body(config, found, "f")
    assert body["per_class"]["c"]["recall"] is None, "a class that was never seen has none"
    single = results(stated(2, 1), ("a", "b"))
    assert single.metrics["auc"].why == "the test set has samples of a single class"


def test_calibration_is_reported_and_limited_on_request() -> None:
    found = results(stated(3, 3), ("a", "b", "c"))
    calibration = found.calibration(Evaluate(**CLOSE))["candidate"].body()
    assert calibration["intervals"]["brier"][0] < calibration["brier"] < calibration["intervals"]["brier"][1]
    assert sum(one["count"] for one in calibration["bins"]) == 200

    def rules(**limits: float) -> dict[str, bool]:
        config = Evaluate.model_validate({**CLOSE, "require": limits})
        return {rule.rule: rule.passed for rule in decide(config, found.measurements(config)).rules}

    assert not any("calibration" in name for name in rules())
    assert rules(ece=0.9, brier=1.9, brier_margin=0.0).items() >= {
        "calibration.ece": True, "calibration.brier": True, "calibration.brier_margin": True}.items()  # fmt: skip
    assert rules(ece=1e-6, brier=1e-6).items() >= {"calibration.ece": False, "calibration.brier": False}.items()


def test_worse_probabilities_fail_though_the_answers_are_equal() -> None:
    columns = stated(3, 3)
    columns["baseline.predicted"] = columns["candidate.predicted"]
    columns["baseline.accuracy"] = columns["candidate.accuracy"]
    sure = np.eye(3, dtype=np.float32)[columns["candidate.predicted"]]
    columns["baseline.probabilities"] = columns["candidate.probabilities"]
    columns["candidate.probabilities"] = sure
    config = Evaluate.model_validate({**CLOSE, "require": {"brier_margin": 0.02}})
    verdict = decide(config, results(columns, ("a", "b", "c")).measurements(config))
    assert [rule.rule for rule in verdict.failures] == ["calibration.brier_margin"]
    assert re.search(r"better than the baseline's and may be 0\.\d+ worse; 0\.02 worse is", verdict.failures[0].detail)


def test_calibration_needs_probabilities() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.require: ece needs a classifier whose task has probabilities"):
        results(numbers()).check(Evaluate.model_validate({"metric": "own", "require": {"ece": 0.1}}))


def test_ranking_metrics_agree_with_scikit_learn_including_ties() -> None:
    generator = np.random.default_rng(0)
    queries = np.repeat(np.arange(30), generator.integers(4, 12, size=30))
    scores = np.round(generator.normal(size=len(queries)), 1)
    relevance = generator.integers(0, 3, size=len(queries)).astype(np.float64)
    shuffled = generator.permutation(len(queries))
    found = query_metrics(queries[shuffled], scores[shuffled], relevance[shuffled])
    for query in range(30):
        own = queries == query
        ndcg = ndcg_score(relevance[None, own], scores[None, own]) if relevance[own].any() else np.nan
        assert found["ndcg"][query] == pytest.approx(ndcg, nan_ok=True)
        both = len(set(relevance[own] > 0)) == 2
        auc = roc_auc_score(relevance[own] > 0, scores[own]) if both else np.nan
        assert found["auc"][query] == pytest.approx(auc, nan_ok=True)


def test_reciprocal_rank_counts_tied_items_first() -> None:
    queries = np.array([7, 7, 7, 9, 9, 9, 9])
    scores = np.array([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    relevance = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert query_metrics(queries, scores, relevance)["mrr"].tolist() == [1 / 2, 1 / 3]


def test_constant_score_is_not_rewarded() -> None:
    found = query_metrics(np.zeros(4, np.int64), np.ones(4), np.array([1.0, 0, 0, 0]))
    assert found["mrr"].tolist() == [1 / 4]
    assert found["auc"].tolist() == [0.5]


def test_query_without_relevant_item_has_no_value() -> None:
    found = query_metrics(np.array([1, 1, 2, 2]), np.arange(4.0), np.array([0.0, 0, 1, 1]))
    assert np.isnan(found["ndcg"]).tolist() == np.isnan(found["mrr"]).tolist() == [True, False]
    assert np.isnan(found["auc"]).all(), "AUC needs an irrelevant item as well"
