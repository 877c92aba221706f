"""Records of studies that are readable without Optuna: what defines a study, and which runs are its trials."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run, RunFile
from pipeline.contract.settings.section import Frozen
from pipeline.data_checks.champion import CHAMPION_PART
from pipeline.history import History, Project, now
from pipeline.plan import key_parts
from pipeline.system.errors import PipelineError
from pipeline.system.files import digest_mapping, write_atomic

Direction: TypeAlias = Literal["maximize", "minimize"]
_SOURCE_SETTINGS = ("task", "codec")  # each choice in the search space may be another file


class StudyFile(Frozen):
    """`study.json`; the trials are in Optuna's journal next to it."""

    name: str
    created: str
    metric: str
    direction: Direction
    space: tuple[str, ...]  # the searched settings
    parts: Mapping[str, str]  # key parts that all its trials have in common


def study_folder(runs: Path, study: str) -> Path:
    return runs / "tune" / study


def read_study(runs: Path, name: str) -> StudyFile:
    path = study_folder(runs, name) / "study.json"
    return StudyFile.parse(path.read_bytes(), path, f"move {path.parent} away")


def study_parts(config: Config, project: Project) -> dict[str, str]:
    """Return what trials depend on but do not vary: key parts without searched settings, and the search itself."""
    space = config.tune.space
    parts: dict[str, str] = {}
    for variant in _variants(config):
        for step in ("prepare", "train"):
            parts |= key_parts(step, variant, project, {})
    parts = {
        name: value
        for name, value in parts.items()
        if name.removeprefix("config:") not in space and name != CHAMPION_PART
    }
    parts |= {
        f"config:tune.space.{key}": json.dumps(axis.model_dump(exclude_defaults=True)) for key, axis in space.items()
    }
    return parts | {"config:tune.metric": tuned_metric(config)}


def tuned_metric(config: Config) -> str:
    return config.tune.metric or config.evaluate.metric


def study_name(parts: Mapping[str, str]) -> str:
    return digest_mapping(parts)[:8]


def write_study(folder: Path, config: Config, parts: Mapping[str, str], lower: Collection[str] = ()) -> None:
    """Record a new study; `lower`: the task's metrics where lower is better, beside the loss."""
    metric = tuned_metric(config)
    body = StudyFile(
        name=folder.name,
        created=now(),
        metric=metric,
        direction="minimize" if metric in ("loss", *lower) else "maximize",
        space=tuple(config.tune.space),
        parts=parts,
    )
    write_atomic(folder / "study.json", body.model_dump_json(indent=2) + "\n")


def all_studies(runs: Path) -> tuple[list[StudyFile], dict[str, str]]:
    """Return the studies, newest first, and why others cannot be read, by name."""
    studies, problems = [], {}
    for path in sorted((runs / "tune").glob("*/study.json")):
        try:
            studies.append(read_study(runs, path.parent.name))
        except PipelineError as error:
            problems[path.parent.name] = str(error)
    return sorted(studies, key=lambda study: study.created, reverse=True), problems


def study_trials(study: str, history: History) -> dict[int, tuple[Run, RunFile]]:
    """Return the newest run of each trial."""
    trials: dict[int, tuple[Run, RunFile]] = {}
    for run, body in history:
        if body.study == study and body.trial is not None:
            trials.setdefault(body.trial, (run, body))
    return trials


def trial_value(run: Run, metric: str) -> float | None:
    """Return the metric of a trial's best weights; None if it is missing or not finite."""
    path = run.output("train") / "summary.json"
    try:
        value: float | None = json.loads(path.read_bytes())["best_validation"].get(metric)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{path}: damaged or missing; to fix it: restore it from a copy, or move the folder of the run away"
        ) from error
    return value


def needed_runs(runs: Path, history: History) -> set[str]:
    """Return the runs that must be kept: the best trial of each study, unfinished and damaged ones.

    Of a study that cannot be read that is every trial.
    """
    studies, problems = all_studies(runs)
    names = {run.id for run, body in history if body.study in problems}
    for study in studies:
        trials = study_trials(study.name, history).values()
        names |= {run.id for run, body in trials if _train_status(body) in ("", "running", "interrupted")}
        values: dict[Run, float] = {}
        for run in (run for run, body in trials if _train_status(body) == "done"):
            try:
                if (value := trial_value(run, study.metric)) is not None:
                    values[run] = value
            except PipelineError:  # it may be the best
                names.add(run.id)
        if values:
            names.add((max if study.direction == "maximize" else min)(values, key=values.__getitem__).id)
    return names


def _train_status(body: RunFile) -> str:
    return body.steps["train"].status if "train" in body.steps else ""


def _variants(config: Config) -> list[Config]:
    """Return the configuration with each choice of task and codec; usually there is only one."""
    variants = [config]
    for key in _SOURCE_SETTINGS:
        if axis := config.tune.space.get(key):
            variants += [override_config(config, [f"{key}={choice}"], "tune.space") for choice in axis.choices]
    return variants
