"""Answers of a bundle compared with those of the model's own library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from export.compare import tied_rows
from export.golden import compare_reference
from pipeline.contract.golden import Golden
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError


class Library:
    def __init__(self, *answers: Any) -> None:
        self.answers = answers

    def reference(self, instances: Any, model: Any) -> Any:
        return self.answers


def compare(*answers: Any) -> str:
    task: Any = Library(*answers)
    golden = Golden({}, {}, ["a text"], [{"label": "good", "score": 0.75}], rtol=1e-3, atol=1e-4)
    return compare_reference(task, nn.Identity(), golden)


def test_equal_answers_are_counted() -> None:
    assert compare({"label": "good", "score": 0.75005}) == "1 answers equal to those of the model's own library"


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (({"label": "bad", "score": 0.75},), r"\(label: expected 'bad', found 'good'\)"),
        (({"label": "good", "score": 0.76},), r"\(score: expected 0\.76, found 0\.75\)"),
        (({"label": "good"},), "the bundle answers"),
        ((), "gives 0 answers for 1 instances"),
    ],
)
def test_other_answers_are_refused(answers: Any, message: str) -> None:
    with pytest.raises(StageError, match=message):
        compare(*answers)


def test_label_between_equal_scores_is_a_tie() -> None:
    outputs = {"label": np.array([0, 1]), "scores": np.array([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0]], np.float32)}
    assert tied_rows(outputs, 2, Export(), {}).tolist() == [True, False]
