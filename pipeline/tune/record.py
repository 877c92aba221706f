"""What stands on disk of a search, read without Optuna: its identity, and which runs are its trials."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import PipelineError
from pipeline.contract.files import digest_mapping, write_atomic
from pipeline.contract.run import Run, RunFile
from pipeline.contract.settings.section import Frozen
from pipeline.data_checks.champion import CHAMPION_PART
from pipeline.history import History, Project, now
from pipeline.plan import key_parts

_CODE = ("task", "codec")  # searched, each choice is another file perhaps


class StudyFile(Frozen):
    """`study.json`; the trials themselves stand in Optuna's journal beside it."""

    name: str
    created: str
    metric: str
    direction: Literal["maximize", "minimize"]
    space: tuple[str, ...]  # the searched keys
    parts: Mapping[str, str]  # what its trials have in common


def folder_of(runs: Path, study: str) -> Path:
    return runs / "tune" / study


def read_study(runs: Path, name: str) -> StudyFile:
    path = folder_of(runs, name) / "study.json"
    try:
        return StudyFile.model_validate_json(path.read_text())
    except ValueError as error:
        raise PipelineError(f"{path}: damaged: {str(error).splitlines()[0]}; move {path.parent} away") from error


def identity(config: Config, project: Project) -> dict[str, str]:
    """All that trials depend on but do not vary: their steps' key parts without the searched keys, and the question."""
    space = config.tune.space
    parts: dict[str, str] = {}
    for variant in _variants(config):
        for step in ("prepare", "train"):
            parts |= key_parts(step, variant, project, {})
    parts = {name: value for name, value in parts.items() if name.removeprefix("config:") not in space and name != CHAMPION_PART}
    parts |= {f"config:tune.space.{key}": _words(axis.model_dump(exclude_defaults=True)) for key, axis in space.items()}
    return parts | {f"config:tune.{name}": str(getattr(config.tune, name)) for name in ("metric", "direction")}


def name_of(parts: Mapping[str, str]) -> str:
    return digest_mapping(parts)[:8]


def write_study(folder: Path, config: Config, parts: Mapping[str, str]) -> None:
    tune = config.tune
    body = StudyFile(
        name=folder.name,
        created=now(),
        metric=tune.metric,
        direction=tune.direction,
        space=tuple(tune.space),
        parts=parts,
    )
    write_atomic(folder / "study.json", body.model_dump_json(indent=2) + "\n")


def all_studies(runs: Path) -> list[StudyFile]:
    """Newest first."""
    found = [read_study(runs, path.parent.name) for path in (runs / "tune").glob("*/study.json")]
    return sorted(found, key=lambda study: study.created, reverse=True)


def trials_of(study: str, history: History) -> dict[int, tuple[Run, RunFile]]:
    """The run of each trial; of a trial that was begun twice, the newest."""
    found: dict[int, tuple[Run, RunFile]] = {}
    for run, body in history:
        if body.study == study and body.trial is not None:
            found.setdefault(body.trial, (run, body))
    return found


def count_trials(runs: Path, history: History) -> list[dict[str, object]]:
    return [{"study": study.name, "runs": len(trials_of(study.name, history))} for study in all_studies(runs)]


def outcome_of(run: Run, metric: str) -> float | None:
    """The metric of the weights that a trial kept; None when that is missing, as it is where it was not finite."""
    summary = json.loads((run.output("train") / "summary.json").read_text())
    value: float | None = summary["best_validation"].get(metric)
    return value


def needed_runs(runs: Path, history: History) -> set[str]:
    """What must not be removed: the best trial of each study, and those it will go on with."""
    needed: set[str] = set()
    for study in all_studies(runs):
        trials = trials_of(study.name, history).values()
        needed |= {run.id for run, body in trials if _state(body) in ("", "running", "interrupted")}
        if best := _best(study, [run for run, body in trials if _state(body) == "done"]):
            needed.add(best.id)
    return needed


def _best(study: StudyFile, done: Iterable[Run]) -> Run | None:
    values = {run: value for run in done if (value := outcome_of(run, study.metric)) is not None}
    choose = max if study.direction == "maximize" else min
    return choose(values, key=lambda run: values[run], default=None)


def _state(body: RunFile) -> str:
    return body.steps["train"].status if "train" in body.steps else ""


def _variants(config: Config) -> list[Config]:
    """The configuration with each choice of code; mostly there is but one."""
    found = [config]
    for key in _CODE:
        if axis := config.tune.space.get(key):
            found += [override_config(config, [f"{key}={choice}"], "tune.space") for choice in axis.choices]
    return found


def _words(values: Mapping[str, object]) -> str:
    return json.dumps(values)
