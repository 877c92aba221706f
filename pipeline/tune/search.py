"""The whole of a search: its study found or begun, its workers started, the best trial made a run.

What is searched: each key checked against the configuration, and as Optuna takes it.
"""

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
from pipeline.tune.record import StudyFile, all_studies, folder_of, identity, name_of, write_study
from pipeline.tune.study import Study

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Search:
    """What one `pipe tune` asks for."""

    folder: Path  # of the project, as it was given
    project: Project
    overrides: tuple[str, ...]
    workers: int
    config: Config

    def study(self) -> Study:
        """The one that these settings and sources belong to."""
        space = distributions(self.config)
        folder = folder_of(self.project.runs, name_of(identity(self.config, self.project)))
        folder.mkdir(parents=True, exist_ok=True)
        return Study(folder, self.config.tune, space)

    def known_study(self, display: Display) -> StudyFile:
        """For those who only look: if there is none for what stands here now, the newest."""
        known = all_studies(self.project.runs)
        if not known:
            raise ConfigError(f"no study in {self.project.runs} yet; `pipe tune` begins one")
        parts = identity(self.config, self.project)
        if body := next((body for body in known if body.name == name_of(parts)), None):
            return body
        display.report(f"study {known[0].name} is from before: {describe_changes(known[0].parts, parts)}")
        return known[0]


def search(order: Search, display: Display) -> Study:
    """All trials, by this and any other `pipe tune` on the same runs."""
    distributions(order.config)  # a mistake is found before anything is written
    with lock_runs(order.project.runs, shared=True):
        study = order.study()
        with exclusive_lock(folder_of(order.project.runs, study.name) / "claim.lock"):
            _announce(order, study, display)
            _prepare(order, study, display)
        if not study.finished:
            _work(order, study)
    return study


def best_run(order: Search, study: Study, steps: tuple[str, ...], display: Display) -> Run:
    """The best trial, walked on; its training is reused. If that was done before, the run that was made then."""
    best = study.best()
    if best is None:
        reasons = {str(trial.user_attrs.get("reason", "")) for trial in study.trials}
        raise StageError(f"no trial of study {study.name} was completed: {'; '.join(sorted(reasons)[:3])}")
    config = override_config(order.config, as_overrides(best.params))
    history = load_history(order.project.runs)
    pipeline_run = PipelineRun(order.project, config, RunRequest(steps), [(run, body) for run, body in history if not body.study])
    planned = pipeline_run.preview()
    sources = {step.source for step in planned}
    if len(sources) == 1 and all(step.action == "reuse" for step in planned):
        return pipeline_run.reused_record(planned[0])[0]
    return run_pipeline(order.project, config, pipeline_run.request, display)


def gpus_of(worker: int, workers: int, env: Mapping[str, str]) -> dict[str, str]:
    """Each worker gets GPUs of its own, as many as the others; where there are too few, all share them."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count_gpus(env))]
    share = len(names) // workers
    if workers == 1 or share == 0:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[worker * share : (worker + 1) * share])}


def _announce(order: Search, study: Study, display: Display) -> None:
    """Write down a new study, and why it is not an earlier one."""
    parts = identity(order.config, order.project)
    known = all_studies(order.project.runs)
    if study.name not in {body.name for body in known}:
        if known:
            display.report(
                f"a new study, because {describe_changes(known[0].parts, parts)}; study {known[0].name} is kept as it is"
            )
        write_study(folder_of(order.project.runs, study.name), order.config, parts)
    wanted = order.config.tune.trials
    display.report(f"study {study.name}: {len(study.trials)} of {wanted} trials begun, {order.workers} worker(s) here")


def _prepare(order: Search, study: Study, display: Display) -> None:
    """Once for all trials, so that a task which is broken is told once."""
    steps = ("prepare",)
    pipeline_run = PipelineRun(order.project, order.config, RunRequest(steps), load_history(order.project.runs))
    if pipeline_run.preview()[0].action == "run":
        run_pipeline(order.project, order.config, RunRequest(steps, study=study.name), display)


def _work(order: Search, study: Study) -> None:
    with tempfile.TemporaryDirectory(prefix="pipe-tune-") as errors, contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_worker(order, study, Path(errors), i)) for i in range(order.workers)]
        try:
            while any(process.poll() is None for process in processes):
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; no trial is lost, the same command goes on") from None
        finally:
            for process in processes:  # all at once; leaving the block waits for each
                process.terminate()
        if error := read_error(Path(errors)):
            raise error
    if not study.finished:
        ends = ", ".join(str(process.returncode) for process in processes)
        raise StageError(
            f"the workers ended with status {ends} before the search was complete; the same command goes on"
        )


def _worker(
    order: Search, study: Study, errors: Path, number: int
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    argv = (
        "python", "-m", "pipeline.tune", "--project", str(order.folder), "--workers", str(order.workers),
        "--errors", str(errors), study.name, *order.overrides,
    )  # fmt: skip
    env = {"PYTHONSAFEPATH": "1", **gpus_of(number, order.workers, os.environ)}
    return child_process(argv, order.project.root, env, sys.stderr)


STEPS = with_upstream(("train",))  # what a trial walks


def distributions(config: Config) -> dict[str, BaseDistribution]:
    """The search space; a key or a value that the configuration refuses is told before the first trial."""
    if not config.tune.space:
        raise ConfigError(
            "tune.space is empty; name what to search, as in `train.lr: {low: 0.0001, high: 0.1, log: true}`"
        )
    return {key: _distribution(config, key, axis) for key, axis in config.tune.space.items()}


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """As they would be typed."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _distribution(config: Config, key: str, axis: Axis) -> BaseDistribution:
    for value in axis.choices or (axis.low, axis.high):
        _check(config, key, value)
    _check_reach(key)
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    assert axis.low is not None and axis.high is not None
    kinds = set(_kinds(_annotation(key)))
    if float in kinds:
        return FloatDistribution(axis.low, axis.high, log=axis.log)
    if int in kinds:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    raise ConfigError(f"tune.space.{key}: it takes no numbers; give it `choices`")


def _check(config: Config, key: str, value: bool | int | float | str | None) -> None:
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    with contextlib.suppress(ConflictError):  # another searched key may settle it; if none does, the trial tells
        override_config(config, as_overrides({key: number}), source="tune.space")


def _check_reach(key: str) -> None:
    """A setting that training does not depend on would give the same value in every trial."""
    reach = {setting for step in STEPS for setting in STEP_KINDS[step].settings}
    if not {key, key.partition(".")[0]} & reach:
        raise ConfigError(
            f"tune.space.{key}: training does not depend on it, so all trials would be alike; "
            f"search keys of {', '.join(sorted(reach))}"
        )


def _annotation(key: str) -> Any:
    found: Any = Config
    for name in key.split("."):
        found = found.model_fields[name].annotation
    return found


def _kinds(annotation: Any) -> Iterator[Any]:
    """Of a key that takes a number or a word, both."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)
