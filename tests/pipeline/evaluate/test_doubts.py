from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.contract.settings.stages import Evaluate
from pipeline.evaluate.gate import Verdict, decide
from pipeline.evaluate.results import Results
from pipeline.statistics.scores import Columns

CLASSES = ("cat", "dog", "fish")
COMMON = np.repeat([0, 1, 2], [160, 100, 40])  # the same number of samples of each class


def _columns(predicted: np.ndarray[Any, Any], baseline: np.ndarray[Any, Any] | None = None) -> Columns:
    columns: Columns = {
        "candidate.accuracy": (predicted == COMMON).astype(np.float64),
        "candidate.predicted": predicted,
    }
    if baseline is not None:
        columns |= {"baseline.accuracy": (baseline == COMMON).astype(np.float64), "baseline.predicted": baseline}
    return columns | {"actual": COMMON}


def _decide(columns: Columns, kind: Any = None, **settings: Any) -> Verdict:
    config = Evaluate(rule="non-inferior", **settings)
    return decide(config, Results(columns, kind, None, CLASSES).measurements(config))


def _mostly_right(share: float) -> np.ndarray[Any, Any]:
    wrong = np.random.default_rng(0).random(len(COMMON)) >= share
    return np.where(wrong, (COMMON + 1) % 3, COMMON)


@pytest.mark.parametrize(
    ("baseline", "why"),
    [
        (np.zeros_like(COMMON), "the baseline always predicts cat"),
        (np.random.default_rng(0).permutation(COMMON), "samples, no more often than by chance"),
    ],
)
def test_class_slices_are_skipped_if_the_baseline_ignores_inputs(baseline: np.ndarray[Any, Any], why: str) -> None:
    verdict = _decide(_columns(_mostly_right(0.8), baseline), "task", margin=0.01)
    assert verdict.verdict == "pass", verdict.failures
    columns = Results(_columns(_mostly_right(0.8), baseline), "task", None, CLASSES)
    details = [slice_.detail for slice_ in columns.slices(Evaluate())]
    assert all(why in detail and "not evaluated" in detail for detail in details), details


def test_class_that_a_real_baseline_predicts_better_stops() -> None:
    candidate, baseline = _mostly_right(1.0), _mostly_right(0.85)
    candidate[COMMON == 2] = 0
    verdict = _decide(_columns(candidate, baseline), "task", margin=0.01)
    assert [rule.rule for rule in verdict.failures] == ["slices"]
    assert _decide(_columns(candidate, baseline), "task", margin=0.01, class_slices=False).verdict == "pass"


def test_summary_warns_of_no_requirement_and_unpredicted_classes() -> None:
    summary = _decide(_columns(_mostly_right(0.8))).summary
    assert summary.endswith("; warning: nothing is required: there is no baseline and no evaluate.require")
    assert "warning" not in _decide(_columns(_mostly_right(0.8)), require={"accuracy": 0.5}).summary
    predicted = np.where(COMMON == 2, 1, COMMON)
    summary = _decide(_columns(predicted), require={"accuracy": 0.5}).summary
    assert summary.endswith("; warning: never predicted: fish")


def test_a_constant_metric_is_named_in_the_first_line() -> None:
    columns = _columns(_mostly_right(0.8)) | {"candidate.accuracy": np.ones(len(COMMON))}
    assert "accuracy is 1 for every sample; check metrics()" in _decide(columns, require={"accuracy": 0.5}).summary
    perfect = _decide(_columns(COMMON.copy()), require={"accuracy": 0.5})
    assert "warning" not in perfect.summary, "right in every sample"


def test_a_small_slice_that_is_all_wrong_is_named_in_the_first_line() -> None:
    predicted = COMMON.copy()
    predicted[:12] = 1
    labels = np.where(np.arange(len(COMMON)) < 12, "north", "")
    columns = _columns(predicted) | {"slice.region": labels}
    summary = _decide(columns, require={"accuracy": 0.5}).summary
    assert "every sample is wrong in region=north, which is too small to be judged" in summary


def test_a_baseline_that_forecasts_the_same_for_every_sample_judges_no_slice() -> None:
    actual = np.random.default_rng(0).normal(size=(90, 3))
    columns = {
        "candidate.own": np.ones(90),
        "candidate.predicted": actual + 0.5,
        "baseline.own": np.ones(90),
        "baseline.predicted": np.tile([1.0, 2.0, 3.0], (90, 1)),
        "actual": actual,
        "slice.side": np.array(["left", "right"] * 45),
    }
    slices = Results(columns, "task", None, None).slices(Evaluate(metric="mae"))
    assert [slice_.judged for slice_ in slices] == [False, False]
    assert "the baseline predicts the same for every sample" in slices[0].detail


@pytest.mark.parametrize(("share", "warns"), [(0.5, True), (0.95, False)])
def test_a_slice_where_neither_model_beats_its_most_frequent_class_is_named(share: float, warns: bool) -> None:
    """Of 160 cats and 40 fish at night, models that are right in half are worse than always answering cat."""
    columns = _columns(_mostly_right(share), _mostly_right(share - 0.1))
    labels = np.where(COMMON == 1, "day", "night")
    labels[:20] = "dawn"
    verdict = _decide(columns | {"slice.time": labels}, "task", margin=0.5)
    sentence = "neither model is better than always answering `cat` in time=night (180 samples)"
    assert verdict.verdict == "pass"
    assert (sentence in verdict.warnings) is warns, "a slice of one class, or of fewer than 30, does not count"
