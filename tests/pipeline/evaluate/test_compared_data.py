from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.contract.data import open_split
from pipeline.contract.run import Run
from pipeline.contract.task import open_task
from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.compared_data import read_test_data
from pipeline.system.errors import GateError

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project

DATA = "        pair = np.random.default_rng(7).normal(size=(50, 2)).astype(np.float32)\n"


def _crown(project: Project) -> str:
    """Make a champion that was evaluated on the current test set, with its run; return the set's fingerprint."""
    champion = project.run("first", "old")
    data = read_test_data(open_split(open_task(champion, project.root), "test"))
    project.crown("first", test_set=data.fingerprint)
    evaluated = champion.path / "evaluate"
    champion.partial("evaluate").rename(evaluated)
    np.save(evaluated / "test_samples.npy", data.samples)
    return data.fingerprint


def test_the_champions_own_test_set_is_named(project: Project) -> None:
    fingerprint = _crown(project)
    run = project.run("right")
    evaluate(run, project.root)
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert verdict["test_set"] == {"champion": fingerprint, "removed": None, "added": None}
    (rule,) = [rule for rule in verdict["rules"] if rule["rule"] == "test_set"]
    assert rule["passed"]
    assert fingerprint[:12] in rule["detail"]


def test_a_filtered_test_set_stops_and_names_what_changed(project: Project) -> None:
    filtered = project.root / "filtered"
    project.replace(
        DATA,
        f"{DATA}        from pathlib import Path\n        if Path({str(filtered)!r}).exists():\n"
        "            pair = np.concatenate([pair[4:], pair[:1] + 1])\n",
    )
    fingerprint = _crown(project)
    filtered.touch()
    run = project.run("right")
    with pytest.raises(GateError, match=f"is not the champion's {fingerprint[:12]}: 4 samples removed, 1 added"):
        evaluate(run, project.root)
    allowed = project.run("right", "two", evaluate={"test_set_changed": "allow"})
    evaluate(allowed, project.root)
    verdict = json.loads((allowed.partial("evaluate") / "verdict.json").read_text())
    assert (verdict["test_set"]["removed"], verdict["test_set"]["added"]) == (4, 1)


def test_changed_test_set_stops_without_the_champions_run_too(project: Project) -> None:
    project.crown("first", test_set="0" * 64)
    run = project.run("right")
    with pytest.raises(GateError, match="is not the champion's 000000000000"):
        evaluate(run, project.root)


def _copies(project: Project, run: Run, samples: Sequence[int]) -> None:
    run.output("prepare").mkdir()
    (run.output("prepare") / "near_copies.json").write_text(json.dumps({"test": list(samples)}))


def _rule(run: Run) -> dict[str, Any] | None:
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    return next((rule for rule in verdict["rules"] if rule["rule"] == "near_duplicates"), None)


def _answers(project: Project) -> tuple[list[int], list[int]]:
    """Return the samples that a model that always takes the first class gets right, and the others."""
    right = open_split(open_task(project.run("first", "probe"), project.root), "test").batch(range(50))["label"] == 0
    return right.nonzero().flatten().tolist(), (~right).nonzero().flatten().tolist()


def test_a_verdict_that_depends_on_near_copies_fails_and_names_both_values(project: Project) -> None:
    right, _ = _answers(project)
    accuracy = len(right) / 50
    run = project.run("first", evaluate={"require": {"accuracy": accuracy}})
    _copies(project, run, right[:5])
    without = (len(right) - 5) / 45
    message = f"5 of 50 test samples are copies .* accuracy is {accuracy:.4f} with and {without:.4f} without them"
    with pytest.raises(GateError, match=message):
        evaluate(run, project.root)
    rule = _rule(run)
    assert rule is not None and not rule["passed"] and not rule["inconclusive"]


def test_near_copies_without_effect_are_only_counted(project: Project) -> None:
    _, wrong = _answers(project)
    run = project.run("first", evaluate={"require": {"accuracy": 0.2}})
    _copies(project, run, wrong[:5])
    evaluate(run, project.root)
    verdict = json.loads((run.partial("evaluate") / "verdict.json").read_text())
    assert _rule(run) is None
    assert verdict["near_duplicates"]["samples"] == 5
    assert verdict["near_duplicates"]["without"]["candidate"]["accuracy"] == pytest.approx((50 - len(wrong)) / 45)


@pytest.mark.parametrize("count", [47, 50])
def test_too_few_samples_without_copies_are_inconclusive(with_baseline: Project, count: int) -> None:
    run = with_baseline.run("right")
    _copies(with_baseline, run, range(count))
    with pytest.raises(GateError, match=f"inconclusive: {count} of 50 test samples"):
        evaluate(run, with_baseline.root)
    rule = _rule(run)
    assert rule is not None and rule["inconclusive"]
    accepted = with_baseline.run("right", "two", evaluate={"inconclusive": "pass"})
    _copies(with_baseline, accepted, range(count))
    evaluate(accepted, with_baseline.root)
