from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from evaluate.classes import confusion, per_class


def test_confusion_and_ratios_agree_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    actual = generator.integers(4, size=300)
    predicted = np.where(generator.random(300) < 0.7, actual, generator.integers(4, size=300))
    matrix = confusion(actual, predicted, 4)
    assert (matrix == confusion_matrix(actual, predicted)).all()
    expected = precision_recall_fscore_support(actual, predicted)
    for i, row in enumerate(per_class(matrix, "abcd").values()):
        assert [row["precision"], row["recall"], row["f1"], row["samples"]] == pytest.approx([e[i] for e in expected])


def test_a_class_that_is_never_seen_nor_predicted_has_no_ratios() -> None:
    matrix = confusion(np.array([0, 0, 1]), np.array([0, 1, 1]), 3)
    assert matrix.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 0]]
    assert per_class(matrix, "abc")["c"] == {"samples": 0, "precision": None, "recall": None, "f1": None}
