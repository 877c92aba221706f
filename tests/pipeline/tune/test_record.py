from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.contract.config import Config, override_config
from pipeline.contract.registry import CHAMPION, Entry, ProposedChange, change_registry
from pipeline.contract.run import Run, StepRecord
from pipeline.history import Project, create_run, load_history, write_record
from pipeline.plan import key_parts
from pipeline.system.errors import PipelineError
from pipeline.tune.record import (
    all_studies,
    needed_runs,
    read_study,
    study_folder,
    study_name,
    study_parts,
    study_trials,
    trial_value,
    write_study,
)

from .conftest import SPACE, MakeConfig, begun


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
        ({}, ["train.lr=0.5", "train.batch_size=2"], True),  # searched, so the configured values are ignored
        ({}, ["serve.threads=2", "evaluate.margin=0.5"], True),
        ({}, ["train.epochs=3"], False),
        ({}, ["codec=task.py:SideCodec"], True),
        ({"metric": "log_likelihood"}, [], False),
        ({"space": {**SPACE, "train.lr": {"low": 0.002, "high": 0.1}}}, [], False),
        ({"space": {"train.lr": SPACE["train.lr"]}}, [], False),
    ],
)
def test_study_is_identified_by_what_its_trials_share(
    project: Project, make_config: MakeConfig, tune: dict[str, object], overrides: list[str], same: bool
) -> None:
    before = study_parts(make_config(), project)
    after = study_parts(override_config(make_config(**tune), overrides), project)
    assert (study_name(before) == study_name(after)) == same


def test_sources_of_every_searched_task_identify_the_study(project: Project, make_config: MakeConfig) -> None:
    (project.root / "wide.py").write_text("class Wide: ...\n")
    config = make_config({"task": {"choices": ["task.py:Sides", "wide.py:Wide"]}})
    before = study_parts(config, project)
    for name in ("points.py", "wide.py"):
        with (project.root / name).open("a") as file:
            file.write("\nEXTRA = len('x')\n")
    after = study_parts(config, project)
    assert {name for name in before if before[name] != after[name]} == {
        "source:points.py", "source:wide.py", "judged:metrics()",
    }  # fmt: skip


def test_new_champion_makes_no_new_study(project: Project, make_config: MakeConfig) -> None:
    before = study_parts(make_config(), project)
    served = create_run(project.runs, make_config(), ("prepare",), "")
    write_record(served, StepRecord(step="prepare", status="done", key="k", parts={"data": "other"}))
    entry = Entry(bundle="b", checkpoint="c", path=f"{served.id}/export/bundle")
    change_registry(project.runs, "", lambda _: ProposedChange(CHAMPION, entry, "deployed"))
    assert key_parts("prepare", make_config(), project, {})["reference:champion"] == "b"
    assert study_parts(make_config(), project) == before


def test_runs_are_found_by_their_trial(project: Project, make_config: MakeConfig) -> None:
    config = make_config()
    study = begun(project, config)
    runs = [trial_run(project, config, study, number, "done") for number in (0, 1)]
    trial_run(project, config, "other", 0, "done")
    create_run(project.runs, config, ("prepare",), "", study)
    history = load_history(project.runs)
    assert {number: run.id for number, (run, _) in study_trials(study, history).items()} == dict(
        enumerate(run.id for run in runs)
    )


@pytest.mark.parametrize(("metric", "kept"), [("accuracy", [1, 3, 4]), ("loss", [1, 3, 4])])
def test_best_and_unfinished_trials_are_needed(
    project: Project, make_config: MakeConfig, metric: str, kept: list[int]
) -> None:
    config = make_config(metric=metric)
    study = begun(project, config)
    endings = [("done", 0.5), ("done", 0.9), ("pruned", 0.0), ("running", 0.0), ("interrupted", 0.0), ("failed", 0.0)]
    runs = [trial_run(project, config, study, i, status, value) for i, (status, value) in enumerate(endings)]
    create_run(project.runs, config, ("prepare",), "")
    assert needed_runs(project.runs, load_history(project.runs)) == {runs[number].id for number in kept}


@pytest.mark.parametrize("content", [b"", bytes(9), b"{}", b"[]", b"\xff", None])
def test_trial_with_a_damaged_summary_is_needed(
    project: Project, make_config: MakeConfig, content: bytes | None
) -> None:
    config = make_config()
    study = begun(project, config)
    runs = [trial_run(project, config, study, i, "done", value) for i, value in enumerate((0.5, 0.9, 0.7))]
    path = runs[0].output("train") / "summary.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert needed_runs(project.runs, load_history(project.runs)) == {runs[0].id, runs[1].id}
    with pytest.raises(PipelineError, match=r"summary\.json: damaged or missing; to fix it: restore it"):
        trial_value(runs[0], "accuracy")


def test_no_trial_of_a_damaged_study_is_removed(project: Project, make_config: MakeConfig) -> None:
    config = make_config()
    study = begun(project, config)
    runs = [trial_run(project, config, study, i, "done", value) for i, value in enumerate((0.5, 0.9))]
    (study_folder(project.runs, study) / "study.json").write_bytes(bytes(9))
    assert needed_runs(project.runs, load_history(project.runs)) == {run.id for run in runs}
    studies, problems = all_studies(project.runs)
    assert (studies, list(problems)) == ([], [study])
    assert "damaged: it is empty; to fix it: move " in problems[study]


def test_newest_study_comes_first(project: Project, make_config: MakeConfig) -> None:
    names = [begun(project, make_config(metric=metric)) for metric in ("accuracy", "log_likelihood")]
    assert {body.name for body in all_studies(project.runs)[0]} == set(names)
    path = study_folder(project.runs, names[0]) / "study.json"
    path.write_text(path.read_text().replace('"created": "2', '"created": "3'))
    assert [body.name for body in all_studies(project.runs)[0]] == names


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("accuracy", "maximize"), ("", "maximize"), ("loss", "minimize"), ("word_errors", "minimize")],
)
def test_direction_is_the_one_that_the_task_declares(
    tmp_path: Path, make_config: MakeConfig, metric: str, direction: str
) -> None:
    study_folder(tmp_path, "abc").mkdir(parents=True)
    write_study(study_folder(tmp_path, "abc"), make_config(metric=metric), {}, lower=["word_errors"])
    study = read_study(tmp_path, "abc")
    assert (study.metric, study.direction) == (metric or "accuracy", direction), "by default that of evaluate"


def test_damaged_record_is_named(project: Project, make_config: MakeConfig) -> None:
    name = begun(project, make_config())
    (study_folder(project.runs, name) / "study.json").write_text("{")
    with pytest.raises(PipelineError, match=r"study\.json: damaged: .* move .* away"):
        read_study(project.runs, name)
