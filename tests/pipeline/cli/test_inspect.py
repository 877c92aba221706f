from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contract.run import Run, StepRecord
from pipeline.history import create_run, find_project, write_record

from .conftest import Pipe


@pytest.fixture
def run(starter: Path) -> Run:
    """A run whose train step is complete."""
    project = find_project(starter)
    run = create_run(project.runs, project.config(), ("prepare", "train"), parent="")
    write_record(run, StepRecord(step="train", status="done", key="k", parts={"config:train.lr": "0.1"}))
    run.log("train").write_text("epoch 1\n")
    return run


def test_status_of_an_empty_project_is_data_too(pipe: Pipe) -> None:
    done = pipe("status", "-o", "json")
    assert json.loads(done.stdout) == {
        "runs": [],
        "began_again": [],
        "overrides": [],
        "studies": [],
        "service": None,
        "cluster": None,
    }
    assert done.stderr == ""


def test_status_shows_the_steps_of_each_run(pipe: Pipe, run: Run) -> None:
    done = pipe("status", "-o", "json")
    assert json.loads(done.stdout)["runs"][0]["train"] == "done"
    assert done.stderr == ""
    assert run.id in pipe("status").stdout
    assert "no service is live" in pipe("status").stdout


def test_a_log_is_printed_as_it_is(pipe: Pipe, run: Run) -> None:
    assert pipe("log").stdout == "epoch 1\n"
    assert json.loads(pipe("log", "-o", "json").stdout)["lines"] == ["epoch 1"]
    assert f"run {run.id} has no log of 'export'; it has train" in pipe("log", "export", expect=2).stderr


def test_a_run_does_not_differ_from_itself(pipe: Pipe, run: Run) -> None:
    assert json.loads(pipe("diff", run.id, "-o", "json").stdout) == []


def test_runs_are_compared_in_one_table(pipe: Pipe, run: Run) -> None:
    assert json.loads(pipe("compare", "-o", "json").stdout)[0]["run"] == run.id


def test_a_report_can_be_written_anywhere(pipe: Pipe, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert pipe("report", "--file", str(target)).stdout == f"{target}\n"
    assert run.id in target.read_text()
    said = json.loads(pipe("report", "-o", "json").stdout)
    assert said == {"run": run.id, "report": str(run.path / "report.html")}


def test_looking_for_a_run_that_is_not_there_is_a_mistake(pipe: Pipe) -> None:
    for command in ("log", "report", "verify", "compare nothing"):
        assert "no runs in" in pipe(*command.split(), expect=2).stderr
