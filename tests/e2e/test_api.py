"""Runs and bundles from Python, without a service."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import InvalidPayload, Run, open_run
from pipeline.api import Bundle
from pipeline.system.errors import BundleError

from .project_folder import ProjectFolder


def test_opened_run_has_the_metrics_of_its_evaluation(finished: ProjectFolder) -> None:
    run = open_run("latest", finished.folder)
    assert isinstance(run, Run)
    assert run.metrics["accuracy"] > 0.8
    assert open_run(run.id, str(finished.folder)) == run == open_run(str(run.path), "a folder without a project")


def test_a_bundle_predicts_what_its_service_predicts(finished: ProjectFolder) -> None:
    bundle = Bundle.load(open_run("latest", finished.folder).bundle_path)
    instances = [[0.0, 0.9], [0.5, -0.9]]
    _, headers, body = finished.request("/v1/models/sides:predict", {"instances": instances})
    assert bundle.predict(instances) == body["predictions"]
    assert headers["x-bundle-digest"] == bundle.digest
    with pytest.raises(InvalidPayload):
        bundle.predict([["no number"]])


def test_a_changed_bundle_is_not_loaded(copied: ProjectFolder) -> None:
    card = copied.latest.bundle_path / "card.md"
    content = card.read_text()
    card.unlink()  # runs share files by hard links
    card.write_text(content + "!")
    with pytest.raises(BundleError, match="content changed since export"):
        Bundle.load(Path(card).parent)


def test_the_program_in_the_documents_runs(finished: ProjectFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    assert "[[[0] * 8] * 8]" in program, "an image of the digits example"
    monkeypatch.chdir(finished.folder)
    exec(program.replace("[[[0] * 8] * 8]", "[[0.5, 0.5]]"))
