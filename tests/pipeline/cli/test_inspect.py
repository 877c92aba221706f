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


def test_status_of_an_empty_project_is_json_too(pipe: Pipe) -> None:
    done = pipe("status", "-o", "json")
    assert json.loads(done.stdout) == {
        "runs": [],
        "restarts": [],
        "overrides": [],
        "studies": [],
        "service": None,
        "clusters": [],
        "problems": [],
    }
    assert done.stderr == ""


def test_status_shows_the_steps_of_each_run(pipe: Pipe, run: Run) -> None:
    done = pipe("status", "-o", "json")
    row = json.loads(done.stdout)["runs"][0]
    assert (row["state"], row["model"], row["steps"]) == ("before prepare", "trained", {"train": "done"})
    assert (row["verdict"], row["metric"], row["value"]) == (None, None, None)
    assert 0 <= row["age"] < 3600, "in seconds"
    run.output("evaluate").mkdir()
    (run.output("evaluate") / "verdict.json").write_text('{"verdict": "pass", "metric": "accuracy"}')
    (run.output("evaluate") / "metrics.json").write_text('{"candidate": {"accuracy": 0.98765432}}')
    write_record(run, StepRecord(step="evaluate", status="done", key="k", parts={}))
    row = json.loads(pipe("status", "-o", "json").stdout)["runs"][0]
    assert (row["verdict"], row["metric"], row["value"]) == ("pass", "accuracy", 0.98765432)
    assert "accuracy 0.9877" in pipe("status").stdout
    assert done.stderr == ""
    assert run.id in pipe("status").stdout
    assert "no service is live" in pipe("status").stdout


def test_logs_prints_a_log_unchanged(pipe: Pipe, run: Run) -> None:
    assert pipe("logs").stdout == "epoch 1\n"
    assert json.loads(pipe("logs", "-o", "json").stdout)["lines"] == ["epoch 1"]
    assert f"run {run.id} has no log of 'export'; it has train" in pipe("logs", "export", expect=2).stderr


def test_compare_of_one_run_is_with_the_latest(pipe: Pipe, run: Run, starter: Path) -> None:
    compared = json.loads(pipe("compare", "-o", "json").stdout)
    assert ([row["run"] for row in compared["runs"]], compared["differences"]) == ([run.id], [])
    project = find_project(starter)
    later = create_run(project.runs, project.config(), ("prepare", "train"), parent="")
    write_record(later, StepRecord(step="train", status="done", key="l", parts={"config:train.lr": "0.2"}))
    compared = json.loads(pipe("compare", run.id, "-o", "json").stdout)
    assert [row["run"] for row in compared["runs"]] == [run.id, later.id]
    assert compared["differences"] == [{"step": "train", "part": "config:train.lr", "before": "0.1", "after": "0.2"}]
    assert "config:train.lr" in pipe("compare", run.id).stdout


def test_a_report_can_be_written_anywhere(pipe: Pipe, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    assert pipe("report", "--file", str(target)).stdout == f"{target}\n"
    assert run.id in target.read_text()
    output = json.loads(pipe("report", "-o", "json").stdout)
    assert output == {"run": run.id, "report": str(run.path / "report.html")}


def test_run_that_does_not_exist_is_an_error(pipe: Pipe) -> None:
    for command in ("logs", "report", "verify", "compare nothing"):
        assert "no runs in" in pipe(*command.split(), expect=2).stderr
