from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import PipelineError
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, change_registry
from pipeline.contract.run import Run, StepRecord
from pipeline.history import Project, create_run, load_history, write_record
from pipeline.plan import key_parts
from pipeline.tune.record import (
    all_studies,
    count_trials,
    folder_of,
    identity,
    name_of,
    needed_runs,
    read_study,
    trials_of,
    write_study,
)

from .conftest import SPACE, MakeConfig


def begun(project: Project, config: Config) -> str:
    """A study that is written down."""
    parts = identity(config, project)
    folder_of(project.runs, name_of(parts)).mkdir(parents=True)
    write_study(folder_of(project.runs, name_of(parts)), config, parts)
    return name_of(parts)


def trial_run(project: Project, config: Config, study: str, number: int, status: str, accuracy: float = 0.0) -> Run:
    run = create_run(project.runs, config, ("prepare", "train"), "", study, number)
    write_record(run, StepRecord.model_validate({"step": "train", "status": status, "key": "k", "parts": {}}))
    if status == "done":
        run.output("train").mkdir()
        summary = {"best_validation": {"accuracy": accuracy, "loss": 1 - accuracy}}
        (run.output("train") / "summary.json").write_text(json.dumps(summary))
    return run


@pytest.mark.parametrize(
    ("tune", "overrides", "same"),
    [
        ({"trials": 99}, [], True),
        ({}, ["train.lr=0.5", "train.batch_size=2"], True),  # searched, so what stands there is not looked at
        ({}, ["serve.threads=2", "evaluate.margin=0.5"], True),
        ({}, ["train.epochs=3"], False),
        ({}, ["codec=task.py:SideCodec"], False),
        ({"metric": "log_likelihood"}, [], False),
        ({"space": {**SPACE, "train.lr": {"low": 0.002, "high": 0.1}}}, [], False),
        ({"space": {"train.lr": SPACE["train.lr"]}}, [], False),
    ],
)
def test_a_study_is_known_by_what_its_trials_have_in_common(
    project: Project, make_config: MakeConfig, tune: dict[str, object], overrides: list[str], same: bool
) -> None:
    before = identity(make_config(), project)
    after = identity(override_config(make_config(**tune), overrides), project)
    assert (name_of(before) == name_of(after)) == same


def test_an_edited_source_makes_another_study(project: Project, make_config: MakeConfig) -> None:
    before = identity(make_config(), project)
    points = project.root / "points.py"
    points.write_text(points.read_text() + "\nEXTRA = 1\n")
    after = identity(make_config(), project)
    assert {name for name in before if before[name] != after[name]} == {"source:points.py"}


def test_another_champion_makes_no_other_study(project: Project, make_config: MakeConfig) -> None:
    before = identity(make_config(), project)
    served = create_run(project.runs, make_config(), ("prepare",), "")
    write_record(served, StepRecord(step="prepare", status="done", key="k", parts={"data": "other"}))
    entry = Entry(bundle="b", checkpoint="c", path=f"{served.id}/export/bundle")
    change_registry(project.runs, "", lambda _: ProposedChange(CHAMPION, entry, "deployed"))
    assert key_parts("prepare", make_config(), project, {})["rival:champion"] == "b"
    assert identity(make_config(), project) == before


def test_the_sources_of_every_searched_task_belong_to_the_study(project: Project, make_config: MakeConfig) -> None:
    (project.root / "wide.py").write_text("class Wide: ...\n")
    config = make_config({"task": {"choices": ["task.py:Sides", "wide.py:Wide"]}})
    assert {"source:task.py", "source:wide.py"} <= identity(config, project).keys()


def test_runs_are_found_by_their_trial(project: Project, make_config: MakeConfig) -> None:
    config = make_config()
    study = begun(project, config)
    runs = [trial_run(project, config, study, number, "done") for number in (0, 1)]
    trial_run(project, config, "other", 0, "done")
    create_run(project.runs, config, ("prepare",), "", study)
    history = load_history(project.runs)
    assert {number: run.id for number, (run, _) in trials_of(study, history).items()} == dict(
        enumerate(run.id for run in runs)
    )
    assert count_trials(project.runs, history) == [{"study": study, "runs": 2}]


@pytest.mark.parametrize(("metric", "kept"), [("accuracy", [1, 3, 4]), ("loss", [1, 3, 4])])
def test_the_best_trial_and_those_to_go_on_with_are_needed(
    project: Project, make_config: MakeConfig, metric: str, kept: list[int]
) -> None:
    config = make_config(metric=metric)
    study = begun(project, config)
    endings = [("done", 0.5), ("done", 0.9), ("pruned", 0.0), ("running", 0.0), ("interrupted", 0.0), ("failed", 0.0)]
    runs = [trial_run(project, config, study, i, status, value) for i, (status, value) in enumerate(endings)]
    create_run(project.runs, config, ("prepare",), "")
    assert needed_runs(project.runs, load_history(project.runs)) == {runs[number].id for number in kept}


def test_a_study_of_which_nothing_is_left_needs_nothing(project: Project, make_config: MakeConfig) -> None:
    begun(project, make_config())
    assert needed_runs(project.runs, []) == set()


def test_the_newest_study_comes_first(project: Project, make_config: MakeConfig) -> None:
    names = [begun(project, make_config(metric=metric)) for metric in ("accuracy", "log_likelihood")]
    assert {body.name for body in all_studies(project.runs)} == set(names)
    path = folder_of(project.runs, names[0]) / "study.json"
    path.write_text(path.read_text().replace('"created": "2', '"created": "3'))
    assert [body.name for body in all_studies(project.runs)] == names


def test_a_damaged_record_is_named(project: Project, make_config: MakeConfig) -> None:
    name = begun(project, make_config())
    (folder_of(project.runs, name) / "study.json").write_text("{")
    with pytest.raises(PipelineError, match=r"study\.json: damaged: .* move .* away"):
        read_study(project.runs, name)


def test_looking_where_nothing_was_searched_finds_nothing(tmp_path: Path) -> None:
    assert all_studies(tmp_path) == []
