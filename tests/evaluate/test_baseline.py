from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from evaluate.evaluation import evaluate
from pipeline.spec.errors import DataError

if TYPE_CHECKING:
    from tests.evaluate.conftest import Project


def test_a_baseline_that_cannot_be_fitted_is_named(project: Project) -> None:
    project.add('    def baseline(self):\n        raise RuntimeError("no solver")\n')
    with pytest.raises(DataError, match=r"baseline\(\): RuntimeError: no solver"):
        evaluate(project.run("right"), project.root)


def test_a_baseline_that_cannot_predict_is_named(project: Project) -> None:
    project.add('    def baseline(self):\n        return lambda batch: batch["picture"]\n')
    with pytest.raises(DataError, match=r"baseline\(\): its predictor failed: KeyError: 'picture'"):
        evaluate(project.run("right"), project.root)


def test_a_baseline_that_draws_random_numbers_is_the_same_each_time(project: Project) -> None:
    project.add("""
    def baseline(self):
        noise = torch.rand(1, 2)
        return lambda batch: batch["pair"] + noise
""")
    runs = [project.run("right", name) for name in ("one", "two")]
    for run in runs:
        evaluate(run, project.root)
    first, second = ((run.partial("evaluate") / "predictions.npz").read_bytes() for run in runs)
    assert first == second
