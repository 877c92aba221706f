"""Run a search: open its study, start workers, run the best trial to the end; and the search space for Optuna."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError, ConflictError, Interrupted, StageError, read_error
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Axis
from pipeline.display import Display
from pipeline.history import Project, exclusive_lock, load_history, lock_runs
from pipeline.plan import STEP_KINDS, describe_changes, with_upstream
from pipeline.processes import child_process, count_gpus
from pipeline.runner import PipelineRun, RunRequest, run_pipeline
from pipeline.tune.record import StudyFile, all_studies, study_folder, study_name, study_parts, write_study
from pipeline.tune.study import Study

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of one `pipe tune`."""

    folder: Path  # of the project, as given on the command line
    project: Project
    overrides: tuple[str, ...]
    workers: int
    config: Config

    def study(self) -> Study:
        """Open the study of these settings and sources."""
        space = search_space(self.config)
        folder = study_folder(self.project.runs, study_name(study_parts(self.config, self.project)))
        folder.mkdir(parents=True, exist_ok=True)
        return Study(folder, self.config.tune, space)

    def existing_study(self, display: Display) -> StudyFile:
        """Return the study of these settings and sources for reading; if there is none, the newest."""
        studies = all_studies(self.project.runs)
        if not studies:
            raise ConfigError(f"no study in {self.project.runs} yet; to fix it: start one with `pipe tune`")
        parts = study_parts(self.config, self.project)
        if body := next((body for body in studies if body.name == study_name(parts)), None):
            return body
        display.report(f"study {studies[0].name} is outdated: {describe_changes(studies[0].parts, parts)}")
        return studies[0]


def run_search(request: SearchRequest, display: Display) -> Study:
    """Run all trials, together with any other `pipe tune` on the same runs."""
    search_space(request.config)  # fail before anything is written
    with lock_runs(request.project.runs, shared=True):
        study = request.study()
        with exclusive_lock(study_folder(request.project.runs, study.name) / "claim.lock"):
            _record_study(request, study, display)
            _prepare_data(request, study, display)
        if not study.finished:
            _run_workers(request, study)
    return study


def run_best_trial(request: SearchRequest, study: Study, steps: tuple[str, ...], display: Display) -> Run:
    """Run the remaining steps with the settings of the best trial, reusing its training, or return that earlier run."""
    best = study.best()
    if best is None:
        reasons = {str(trial.user_attrs.get("reason", "")) for trial in study.trials}
        raise StageError(f"no trial of study {study.name} has finished: {'; '.join(sorted(reasons)[:3])}")
    config = override_config(request.config, as_overrides(best.params))
    history = load_history(request.project.runs)
    pipeline_run = PipelineRun(
        request.project, config, RunRequest(steps), [(run, body) for run, body in history if not body.study]
    )
    planned = pipeline_run.preview()
    sources = {step.source for step in planned}
    if len(sources) == 1 and all(step.action == "reuse" for step in planned):
        return pipeline_run.reused_record(planned[0])[0]
    return run_pipeline(request.project, config, pipeline_run.request, display)


def assign_gpus(worker: int, workers: int, env: Mapping[str, str]) -> dict[str, str]:
    """Assign the same number of GPUs to each worker; with too few GPUs all workers share them."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count_gpus(env))]
    count = len(names) // workers
    if workers == 1 or count == 0:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[worker * count : (worker + 1) * count])}


def _record_study(request: SearchRequest, study: Study, display: Display) -> None:
    """Record a new study, and print why it does not continue an earlier one."""
    parts = study_parts(request.config, request.project)
    studies = all_studies(request.project.runs)
    if study.name not in {body.name for body in studies}:
        if studies:
            display.report(
                f"a new study, because {describe_changes(studies[0].parts, parts)}; study {studies[0].name} is kept"
            )
        write_study(study_folder(request.project.runs, study.name), request.config, parts)
    total = request.config.tune.trials
    display.report(f"study {study.name}: {len(study.trials)} of {total} trials started, {request.workers} worker(s)")


def _prepare_data(request: SearchRequest, study: Study, display: Display) -> None:
    """Run prepare once for all trials, so that a broken task is reported once."""
    steps = ("prepare",)
    pipeline_run = PipelineRun(request.project, request.config, RunRequest(steps), load_history(request.project.runs))
    if pipeline_run.preview()[0].action == "run":
        run_pipeline(request.project, request.config, RunRequest(steps, study=study.name), display)


def _run_workers(request: SearchRequest, study: Study) -> None:
    with tempfile.TemporaryDirectory(prefix="pipe-tune-") as errors, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(_start_worker(request, study, Path(errors), i)) for i in range(request.workers)
        ]
        try:
            while any(process.poll() is None for process in processes):
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; no trial is lost, run the same command to continue") from None
        finally:
            for process in processes:  # first all of them; leaving the block waits for each
                process.terminate()
        if error := read_error(Path(errors)):
            raise error
    if not study.finished:
        ends = ", ".join(str(process.returncode) for process in processes)
        raise StageError(
            f"the workers ended with status {ends} before the search was complete; run the same command to continue"
        )


def _start_worker(
    request: SearchRequest, study: Study, errors: Path, number: int
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    argv = (
        "python", "-m", "pipeline.tune", "--project", str(request.folder), "--workers", str(request.workers),
        "--errors", str(errors), study.name, *request.overrides,
    )  # fmt: skip
    env = {"PYTHONSAFEPATH": "1", **assign_gpus(number, request.workers, os.environ)}
    return child_process(argv, request.project.root, env, sys.stderr)


TRIAL_STEPS = with_upstream(("train",))  # that a trial runs


def search_space(config: Config) -> dict[str, BaseDistribution]:
    """Return the search space; settings and values that the configuration rejects are errors."""
    if not config.tune.space:
        raise ConfigError(
            "tune.space is empty; to fix it: name settings to search, as in "
            "`train.lr: {low: 0.0001, high: 0.1, log: true}`"
        )
    return {key: _distribution(config, key, axis) for key, axis in config.tune.space.items()}


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return overrides as typed on the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _distribution(config: Config, key: str, axis: Axis) -> BaseDistribution:
    for value in axis.choices or (axis.low, axis.high):
        _check(config, key, value)
    _check_affects_training(key)
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    assert axis.low is not None and axis.high is not None
    kinds = set(_types(_annotation(key)))
    if float in kinds:
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if int in kinds:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    raise ConfigError(f"tune.space.{key}: it is not a number; to fix it: give it `choices`")


def _check(config: Config, key: str, value: bool | int | float | str | None) -> None:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    with contextlib.suppress(
        ConflictError
    ):  # another searched setting may resolve it; if none does, the trial is refused
        override_config(config, as_overrides({key: number}), source="tune.space")


def _check_affects_training(key: str) -> None:
    """Reject settings that training does not depend on: every trial would have the same value."""
    settings = {setting for step in TRIAL_STEPS for setting in STEP_KINDS[step].settings}
    if not {key, key.partition(".")[0]} & settings:
        raise ConfigError(
            f"tune.space.{key}: training does not depend on it, so all trials would be equal; "
            f"to fix it: search settings of {', '.join(sorted(settings))}"
        )


def _annotation(key: str) -> Any:
    annotation: Any = Config
    for name in key.split("."):
        annotation = annotation.model_fields[name].annotation
    return annotation


def _types(annotation: Any) -> Iterator[Any]:
    """Yield all types in an annotation, as of a setting that takes a number or a string."""
    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)
