from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss

from pipeline.spec.statistics.calibration import brier, curve, expected_error


def test_the_brier_score_of_two_classes_is_twice_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    second, actual = generator.random(200), generator.integers(2, size=200)
    scores = brier(np.stack([1 - second, second], axis=1), actual)
    assert scores.mean() == pytest.approx(2 * brier_score_loss(actual, second))
    assert brier(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 0])).tolist() == [0.0, 2.0]


def test_answers_as_sure_as_they_are_right_have_no_error() -> None:
    generator = np.random.default_rng(1)
    stated = generator.random(100_000)
    right = (generator.random(100_000) < stated).astype(np.float64)
    assert expected_error(curve(stated, right)) < 0.01


def test_an_error_is_the_gap_weighed_by_samples() -> None:
    stated, right = np.array([0.9] * 6 + [0.1] * 2), np.array([1.0] * 3 + [0.0] * 3 + [0.0] * 2)
    bins = curve(stated, right, bins=10)
    assert [one.samples for one in bins] == [2, 6]
    assert [one.confidence for one in bins] == pytest.approx([0.1, 0.9])
    assert [one.accuracy for one in bins] == [0.0, 0.5]
    assert expected_error(bins) == pytest.approx((6 * 0.4 + 2 * 0.1) / 8)


def test_a_certain_answer_falls_into_the_last_bin() -> None:
    (last,) = curve(np.array([1.0]), np.array([1.0]), bins=4)
    assert (last.low, last.high) == (0.75, 1.0)
