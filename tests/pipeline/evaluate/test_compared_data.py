from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pipeline.contract.data import open_split
from pipeline.contract.errors import GateError
from pipeline.contract.task import open_task
from pipeline.evaluate.__main__ import evaluate
from pipeline.evaluate.compared_data import read_test_data

if TYPE_CHECKING:
    from tests.pipeline.evaluate.conftest import Project

DATA = "        pair = np.random.default_rng(7).normal(size=(50, 2)).astype(np.float32)\n"


def _crown(project: Project) -> str:
    """Make a champion that was judged on the present test set, with its run; return the fingerprint."""
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


def test_without_the_champions_run_the_change_is_known_and_its_samples_are_not(project: Project) -> None:
    project.crown("first", test_set="0" * 64)
    run = project.run("right")
    with pytest.raises(GateError, match="is not the champion's 000000000000"):
        evaluate(run, project.root)
