"""`pipe report` as it is typed: beside another run, and the list of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.contract.errors import ConfigError
from pipeline.history import Project

from .made import make_other, make_run


def typed(project: Project, *words: str) -> dict[str, object]:
    done = CliRunner().invoke(app, ["-C", str(project.root), "report", *words, "-o", "json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_a_run_beside_another_has_a_page_of_its_own(project: Project) -> None:
    run, other = make_run(project.runs), make_other(project.runs)
    target = run.path / f"report-with-{other.id}.html"
    said = typed(project, run.id, "--compare", other.id)
    assert said == {"run": run.id, "compare": other.id, "report": str(target)}
    assert "Beside the other run" in target.read_text()
    assert not (run.path / "report.html").exists()


def test_a_run_is_not_put_beside_itself(project: Project) -> None:
    run = make_run(project.runs)
    with pytest.raises(ConfigError, match="that is run 20260102-030405-abcd itself"):
        typed(project, run.id, "--compare", "latest")


def test_the_index_lists_every_run(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no runs in .* yet"):
        typed(project, "--index")
    run, other = make_run(project.runs), make_other(project.runs)
    assert typed(project, "--index") == {"runs": [run.id, other.id], "report": str(project.runs / "index.html")}
    target = tmp_path / "list.html"
    typed(project, "--index", "--file", str(target))
    assert run.id in target.read_text()
