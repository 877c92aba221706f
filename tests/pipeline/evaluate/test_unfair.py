"""Unfair or meaningless comparisons, each of which one check must stop.

docs/evaluation.md describes the checks; tests/export has the damaged files.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.evaluate.__main__ import evaluate
from pipeline.system.errors import GateError
from pipeline.system.files import write_json

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project


DATA = """\
        pair = np.random.default_rng(7).normal(size=(50, 2)).astype(np.float32)
        return {"pair": pair, "label": pair.argmax(axis=1)}
"""
# One sample in twelve is of the second class.
IMBALANCED = """\
        pair = np.abs(np.random.default_rng(7).normal(size=(600, 2))).astype(np.float32)
        pair.sort(axis=1)
        pair[np.arange(600) % 12 != 0] = pair[np.arange(600) % 12 != 0, ::-1]
        return {"pair": pair, "label": pair.argmax(axis=1)}
"""


def failed(project: Project, answers: str, **evaluate_: Any) -> set[str]:
    """Return the rules that stopped this candidate."""
    run = project.run(answers, evaluate=evaluate_)
    with pytest.raises(GateError):
        evaluate(run, project.root)
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert verdict["verdict"] == "fail"
    return {rule["rule"] for rule in verdict["rules"] if not rule["passed"]}


def test_stored_numbers_of_a_champion_are_ignored(project: Project) -> None:
    """Its metrics.json has a low accuracy; evaluated again, it is high."""
    project.crown("right")
    (project.runs / "old" / "evaluate").mkdir()
    write_json(project.runs / "old" / "evaluate" / "metrics.json", {"samples": 50, "candidate": {"accuracy": 0.01}})
    assert failed(project, "first") == {"non-inferior"}


def test_shifted_labels_fail_an_absolute_requirement(with_baseline: Project) -> None:
    with_baseline.replace("pair.argmax(axis=1)}", "1 - pair.argmax(axis=1)}")
    assert failed(with_baseline, "right", require={"accuracy": 0.9}) == {"require.accuracy"}


def test_constant_answer_fails_the_slices_despite_a_common_class(with_baseline: Project) -> None:
    with_baseline.replace(DATA, IMBALANCED)
    assert failed(with_baseline, "first", margin=0.2, require={"accuracy": 0.9}) == {"slices"}


def test_favorable_slice_does_not_save_a_candidate(with_baseline: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.evaluate.slices.MIN_SLICE_SAMPLES", 5)
    picked = DATA.replace("axis=1)}", 'axis=1), "picked": (pair[:, 0] > pair[:, 1]).astype(np.int64)}')
    with_baseline.replace(DATA, picked)
    assert "non-inferior" in failed(with_baseline, "first", slices=["picked"])


def test_too_few_samples_to_show_a_difference_fail(with_baseline: Project) -> None:
    """Nine of twelve right against ten: no test would call that different."""
    few = DATA.replace("(50, 2)", "(12, 2)").replace("pair.argmax(axis=1)}", "pair.argmax(axis=1) ^ flipped}")
    with_baseline.replace(DATA, "        flipped = (np.arange(12) == 3).astype(np.int64)\n" + few)
    assert failed(with_baseline, "first", margin=0.1) == {"non-inferior"}
