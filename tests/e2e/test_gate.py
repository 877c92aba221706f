from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.contract.run import Run

from .project_folder import ProjectFolder


def verdict_of(project: ProjectFolder) -> dict[str, Any]:
    return project.latest.verdict()


def rejected(project: ProjectFolder) -> Run:
    floor = "evaluate.require={accuracy: 1.5}"
    stderr = project.pipe("run", "--until", "export", floor, expect=3).stderr
    assert "below the required 1.5" in stderr.splitlines()[-1]
    return project.latest


def test_a_rejected_candidate_stops_the_pipeline(copied: ProjectFolder) -> None:
    run = rejected(copied)
    assert run.read().steps["evaluate"].status == "rejected"
    assert verdict_of(copied)["verdict"] == "fail"
    assert not run.output("export").exists()


@pytest.mark.long  # tests/pipeline/test_override.py and tests/export/test_step.py test the steps
def test_an_overridden_candidate_is_recorded(copied: ProjectFolder) -> None:
    run = rejected(copied)
    reason = "wanted for a demonstration"
    assert "continues it" in copied.pipe("gate", "override", run.id, "--reason", reason).stdout
    resumed = copied.pipe("run", "--resume", run.id).stderr
    assert "evaluate: " in resumed and "evaluate | " not in resumed, "it is not evaluated again"
    assert copied.latest.id == run.id
    assert reason in (run.bundle_path / "card.md").read_text()
    assert run.bundle().manifest.verdict == "overridden"
    assert reason in copied.pipe("verify", run.id).stdout
    explained = json.loads(copied.pipe("gate", "explain", run.id, "-o", "json").stdout)
    assert explained["override"]["reason"] == reason
