"""The `pipe report` command: one run, two runs compared, and the index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.history import Project
from pipeline.system.errors import ConfigError

from .example_runs import make_other_run, make_run


def pipe_report(project: Project, *arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(
        app, ["-C", str(project.root), "report", *arguments, "-o", "json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_comparison_is_written_to_its_own_file(project: Project) -> None:
    run, other = make_run(project.runs), make_other_run(project.runs)
    target = run.path / f"report-with-{other.id}.html"
    result = pipe_report(project, run.id, "--compare", other.id)
    assert result == {"run": run.id, "compare": [other.id], "report": str(target)}
    assert "Compared with the other run" in target.read_text()
    assert not (run.path / "report.html").exists()


def test_run_is_not_compared_with_itself(project: Project) -> None:
    run = make_run(project.runs)
    with pytest.raises(ConfigError, match="that is run 20260102-030405-abcd itself"):
        pipe_report(project, run.id, "--compare", "latest")


def test_several_runs_are_compared_in_one_report(project: Project) -> None:
    run, other = make_run(project.runs), make_other_run(project.runs)
    third = make_other_run(project.runs, name="20260101-010101-aa02")
    result = pipe_report(project, run.id, "--compare", other.id, "--compare", third.id)
    assert result["compare"] == [other.id, third.id]
    assert "Compared with other runs" in Path(str(result["report"])).read_text()
    with pytest.raises(ConfigError, match="is named twice"):
        pipe_report(project, run.id, "--compare", other.id, "--compare", other.id)
    with pytest.raises(ConfigError, match="a report shows at most 4 beside its own; leave out 1"):
        pipe_report(project, run.id, *(["--compare", other.id] * 5))


def test_index_lists_every_run(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no runs in .* yet"):
        pipe_report(project, "--index")
    run, other = make_run(project.runs), make_other_run(project.runs)
    assert pipe_report(project, "--index") == {"runs": [run.id, other.id], "report": str(project.runs / "index.html")}
    target = tmp_path / "list.html"
    pipe_report(project, "--index", "--file", str(target))
    assert run.id in target.read_text()
