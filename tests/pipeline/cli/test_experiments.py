from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contract.run import StepRecord
from pipeline.history import Project, create_run, find_project, write_record
from pipeline.tune.record import study_folder
from pipeline.tune.search import Study, TrialResult, search_space

from ..tune.conftest import begun
from .conftest import Pipe

SPACE = "tune:\n  trials: 2\n  space:\n    train.lr: {low: 1e-4, high: 0.1, log: true}\n"


@pytest.fixture
def project(starter: Path) -> Project:
    with (starter / "pipe.yaml").open("a") as file:
        file.write(f"\n{SPACE}")
    return find_project(starter)


@pytest.fixture
def study(project: Project) -> Study:
    """Two trials, the second is the best, and their runs."""
    config = project.config()
    folder = study_folder(project.runs, begun(project, config))
    study = Study(folder, config.tune, search_space(config))
    for value in (0.5, 0.75):
        claim = study.claim()
        assert claim is not None
        run = create_run(project.runs, config, ("prepare", "train"), "", study.name, claim.number)
        run.output("train").mkdir()
        (run.output("train") / "summary.json").write_text(json.dumps({"best_validation": {"accuracy": value}}))
        write_record(run, StepRecord(step="train", status="done", key="k", parts={}))
        study.record_result(claim, TrialResult("done", value))
    return study


def test_a_mistake_in_the_space_is_reported_before_anything_is_written(pipe: Pipe, starter: Path) -> None:
    stderr = pipe("tune", "tune.space={train.lrs: {choices: [1]}}", expect=2).stderr
    assert stderr == "error: tune.space: unknown setting `train.lrs`; did you mean `train.lr`?\n"
    assert not (starter / "runs").exists()


def test_unknown_arguments_of_tune_are_reported(pipe: Pipe, project: Project) -> None:
    assert "'train': `pipe tune` takes `status` and key=value" in pipe("tune", "train", expect=2).stderr
    assert "no step 'trian'" in pipe("tune", "--until", "trian", expect=2).stderr


def test_tune_status_before_the_first_search_creates_nothing(pipe: Pipe, project: Project) -> None:
    assert "yet; to fix it: start one with `pipe tune`" in pipe("tune", "status", expect=2).stderr
    assert not project.runs.exists()


def test_the_trials_are_listed_best_first(pipe: Pipe, study: Study) -> None:
    found = json.loads(pipe("tune", "status", "-o", "json").stdout)
    assert (found["study"], found["metric"], found["direction"]) == (study.name, "accuracy", "maximize")
    assert [(trial["trial"], trial["state"], trial["accuracy"]) for trial in found["trials"]] == [
        (1, "done", 0.75),
        (0, "done", 0.5),
    ]
    assert found["trials"][0]["train.lr"] == study.trials[1].params["train.lr"]
    assert pipe("tune", "status").stdout.splitlines()[1].split()[:3] == ["1", "done", "0.75"]


def test_outdated_study_is_shown_with_the_changed_settings(pipe: Pipe, study: Study) -> None:
    done = pipe("tune", "status", "train.epochs=77", "-o", "json")
    assert json.loads(done.stdout)["study"] == study.name
    assert f"study {study.name} is outdated: train.epochs" in done.stderr


def test_status_counts_trials_and_does_not_list_them(pipe: Pipe, study: Study, project: Project) -> None:
    ordinary = create_run(project.runs, project.config(), ("prepare",), "").id
    found = json.loads(pipe("status", "-o", "json").stdout)
    assert [run["run"] for run in found["runs"]] == [ordinary]
    assert found["studies"] == [{"study": study.name, "runs": 2}]
    assert f"study {study.name}: runs of 2 trials; see `pipe tune status`" in pipe("status").stdout


def test_gc_removes_finished_trials_but_the_best(pipe: Pipe, study: Study, project: Project) -> None:
    ordinary = create_run(project.runs, project.config(), ("prepare",), "").id
    best = json.loads(pipe("tune", "status", "-o", "json").stdout)["trials"][0]["run"]
    removed = json.loads(pipe("gc", "--keep", "1", "-o", "json").stdout)["removed"]
    assert len(removed) == 1
    assert sorted(path.name for path in project.runs.glob("2*")) == sorted([ordinary, best])
    trials = json.loads(pipe("tune", "status", "-o", "json").stdout)["trials"]
    assert [(trial["trial"], trial["run"]) for trial in trials] == [(1, best), (0, None)], "its value is kept"
