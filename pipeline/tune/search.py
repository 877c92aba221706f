"""Search for better settings: open a study, start workers, train the best trial to the end.

The study is shared by workers on several machines: each trial is claimed by one worker, and continued by another if
that one is killed. Trials are stored in Optuna's journal, a file that all workers append to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from pipeline.contract.config import Config, override_config
from pipeline.contract.run import Run
from pipeline.contract.settings.stages import Axis, Tune
from pipeline.display import Display
from pipeline.executors.local import child_process, count_gpus
from pipeline.history import FileLock, Project, load_history, lock_runs, try_lock
from pipeline.plan import CHECK, STEP_KINDS, describe_changes, with_upstream
from pipeline.run import run_pipeline
from pipeline.system.errors import ConfigError, ConflictError, Interrupted, PipelineError, StageError, read_error
from pipeline.system.files import exclusive_lock, read_object
from pipeline.system.fork_server import Process
from pipeline.tune.record import (
    Direction,
    StudyFile,
    all_studies,
    read_study,
    study_folder,
    study_name,
    study_parts,
    write_study,
)
from pipeline.work import RunRequest, Work

_POLL_SECONDS = 0.1
_NEED = "without which two workers could train one trial; to fix it: search in a project folder on another one"


@dataclass(frozen=True)
class SearchRequest:
    """The arguments of one `pipe tune`."""

    folder: Path  # of the project, as given on the command line
    project: Project
    overrides: tuple[str, ...]
    workers: int
    config: Config

    def study(self) -> Study:
        """Open the recorded study of these settings and sources."""
        runs, name = self.project.runs, study_name(study_parts(self.config, self.project))
        direction = read_study(runs, name).direction
        return Study(study_folder(runs, name), self.config.tune, search_space(self.config), direction)

    def existing_study(self, display: Display) -> StudyFile:
        """Return the study of these settings and sources for reading; if there is none, the newest."""
        studies, _ = all_studies(self.project.runs)
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
    with lock_runs(request.project.runs, shared=True, need=_NEED):
        _record_study(request, display)
        study = request.study()
        total = request.config.tune.trials
        display.report(
            f"study {study.name}: {len(study.trials)} of {total} trials started, {request.workers} worker(s)"
        )
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
    work = Work(request.project, config, RunRequest(steps), [(run, body) for run, body in history if not body.study])
    planned = work.preview()
    sources = {step.source for step in planned}
    if len(sources) == 1 and all(step.action == "reuse" for step in planned):
        return work.reused_record(planned[0])[0]
    return run_pipeline(request.project, config, work.request, display)


def assign_gpus(worker: int, workers: int, env: Mapping[str, str]) -> dict[str, str]:
    """Assign the same number of GPUs to each worker; with too few GPUs all workers share them."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count_gpus(env))]
    count = len(names) // workers
    if workers == 1 or count == 0:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[worker * count : (worker + 1) * count])}


def _record_study(request: SearchRequest, display: Display) -> None:
    """Prepare the data and record a new study; print why it does not continue an earlier one."""
    parts = study_parts(request.config, request.project)
    name, (studies, problems) = study_name(parts), all_studies(request.project.runs)
    if name in problems:
        raise PipelineError(problems[name])
    folder = study_folder(request.project.runs, name)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / "claim.lock"):
        prepared_run = _prepare_data(request, name, display)
        if name in {body.name for body in studies}:
            return
        if studies:
            display.report(
                f"a new study, because {describe_changes(studies[0].parts, parts)}; study {studies[0].name} is kept"
            )
        checks = read_object(prepared_run.output("prepare") / "checks.json")
        write_study(folder, request.config, parts, checks.get("lower_is_better", ()))


def _prepare_data(request: SearchRequest, study: str, display: Display) -> Run:
    """Run the steps before training once for all trials; return the run that has the data."""
    steps = (CHECK, "prepare")
    work = Work(request.project, request.config, RunRequest(steps), load_history(request.project.runs))
    decisions = work.preview()
    if any(decision.action == "run" for decision in decisions):
        return run_pipeline(request.project, request.config, RunRequest(steps, study=study), display)
    return work.reused_record(decisions[-1])[0]


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
                process.send_signal(signal.SIGTERM)
        if error := read_error(Path(errors)):
            raise error
    if not study.finished:
        ends = ", ".join(str(process.wait()) for process in processes)
        raise StageError(
            f"the workers ended with status {ends} before the search was complete; run the same command to continue"
        )


def _start_worker(
    request: SearchRequest, study: Study, errors: Path, number: int
) -> contextlib.AbstractContextManager[Process]:
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
    with contextlib.suppress(ConflictError):  # another searched setting may resolve it; else the trial is refused
        override_config(config, as_overrides({key: number}), source="tune.space")


def _check_affects_training(key: str) -> None:
    """Reject settings that training does not depend on: every trial would have the same value."""
    settings = {setting for step in TRIAL_STEPS if step != CHECK for setting in STEP_KINDS[step].settings}
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


State: TypeAlias = Literal["done", "pruned", "refused", "failed", "running", "unfinished"]
STARTUP_TRIALS = 5  # that must finish before the median pruner starts
WARMUP_EPOCHS = 1  # of a trial before it may be pruned
# The sampler treats pruned trials as bad ones and ignores failed ones.
_OPTUNA_STATES = {"pruned": TrialState.PRUNED, "refused": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial; `caused_by_settings` is true if it failed because of its settings."""

    state: Literal["done", "pruned", "refused", "failed"]
    value: float | None = None
    reason: str = ""
    caused_by_settings: bool = False


@dataclass(frozen=True)
class Claim:
    """A trial that belongs to this worker as long as it holds the lock."""

    trial: optuna.Trial
    values: Mapping[str, Any]
    lock: FileLock

    @property
    def number(self) -> int:
        return self.trial.number


class Study:
    """A study; the direction counts for a new one."""

    def __init__(
        self, folder: Path, tune: Tune, space: Mapping[str, BaseDistribution], direction: Direction = "maximize"
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._tune, self._space = folder, tune, space
        self._storage = open_journal(folder / "journal.log")
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=folder.name,
            direction=direction,
            pruner=make_pruner(tune),
            load_if_exists=True,
        )

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    @property
    def finished(self) -> bool:
        trials = self.trials
        return len(trials) >= self._tune.trials and all(trial.state.is_finished() for trial in trials)

    def claim(self) -> Claim | None:
        """Claim an abandoned trial or start a new one; None if other workers have all remaining ones."""
        with exclusive_lock(self._folder / "claim.lock"):
            trials = self.trials
            for number in [trial.number for trial in trials if not trial.state.is_finished()]:
                if lock := self._lock_if_abandoned(number):
                    return self._make_claim(self._reopen(number), lock)
            if len(trials) >= self._tune.trials:
                return None
            lock = try_lock(self._lock(len(trials)))
            assert lock, "only this method starts trials"
            self._study.sampler = make_sampler(len(trials))
            return self._make_claim(self._study.ask(), lock)

    def record_result(self, claim: Claim, result: TrialResult) -> None:
        claim.trial.set_user_attr("state", result.state)
        claim.trial.set_user_attr("reason", result.reason)
        if result.state == "done":
            self._study.tell(claim.number, result.value)
        else:
            state = TrialState.PRUNED if result.caused_by_settings else _OPTUNA_STATES[result.state]
            self._study.tell(claim.number, state=state)
        claim.lock.release()
        self._lock(claim.number).unlink(missing_ok=True)

    def trial_state(self, trial: FrozenTrial) -> State:
        if trial.state.is_finished():
            state: State = trial.user_attrs["state"]
            return state
        if lock := self._lock_if_abandoned(trial.number):
            lock.release()
            return "unfinished"
        return "running"

    def ranked_trials(self) -> list[FrozenTrial]:
        """Return complete trials by value, best first, then the others in order."""
        sign = -1 if self._study.direction == StudyDirection.MAXIMIZE else 1
        complete = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        incomplete = [trial for trial in self.trials if trial.state != TrialState.COMPLETE]
        return [*sorted(complete, key=lambda trial: sign * (trial.value or 0.0)), *incomplete]

    def best(self) -> FrozenTrial | None:
        return next((trial for trial in self.ranked_trials() if trial.state == TrialState.COMPLETE), None)

    def _lock_if_abandoned(self, number: int) -> FileLock | None:
        """Return the lock of a trial without a worker, unless it has just been finished."""
        lock = try_lock(self._lock(number))
        if lock and self.trials[number].state.is_finished():
            lock.release()
            return None
        return lock

    def _make_claim(self, trial: optuna.Trial, lock: FileLock) -> Claim:
        return Claim(trial, {name: _suggest(trial, name, kind) for name, kind in self._space.items()}, lock)

    def _reopen(self, number: int) -> optuna.Trial:
        """Reopen an unfinished trial; settings that it lacks are sampled when it is claimed."""
        self._study.sampler = make_sampler(number)
        study_id = self._storage.get_study_id_from_name(self.name)
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _lock(self, number: int) -> Path:
        return self._folder / f"trial-{number}.lock"


def make_pruner(tune: Tune) -> BasePruner:
    """Return the pruner; its steps are validations, counted from one."""
    if tune.pruner == "median":
        return MedianPruner(n_startup_trials=STARTUP_TRIALS, n_warmup_steps=WARMUP_EPOCHS)
    if tune.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=WARMUP_EPOCHS)
    return NopPruner()


def make_sampler(number: int) -> optuna.samplers.BaseSampler:
    """Return a sampler with a seed per trial, so that workers differ and a resumed search samples the same values."""
    digest = hashlib.sha256(f"0/{number}".encode()).digest()[:4]
    return optuna.samplers.TPESampler(seed=int.from_bytes(digest, "big"))


def _suggest(trial: optuna.Trial, name: str, kind: BaseDistribution) -> Any:
    if isinstance(kind, FloatDistribution):
        return trial.suggest_float(name, kind.low, kind.high, log=kind.log)
    if isinstance(kind, IntDistribution):
        return trial.suggest_int(name, kind.low, kind.high, log=kind.log)
    assert isinstance(kind, CategoricalDistribution)
    return trial.suggest_categorical(name, kind.choices)


def open_journal(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path), KernelLock(path)))


class KernelLock(JournalFileOpenLock):
    """A lock that the kernel releases when a process is killed; Optuna's own lock files block all others for 30 s.

    An incomplete line of a killed process is truncated first, as it would corrupt the next line.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal = journal
        self._held = contextlib.ExitStack()

    def acquire(self) -> bool:
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive_lock(self._journal.with_suffix(".lock"), _NEED))
            truncate_incomplete_line(self._journal)
            self._held = stack.pop_all()
        return True

    def release(self) -> None:
        self._held.close()


def truncate_incomplete_line(path: Path) -> None:
    """Remove the last line of a file if it does not end with a newline."""
    with path.open("r+b") as file:
        size = position = file.seek(0, 2)
        while position and _byte(file, position - 1) != b"\n":
            position -= 1
        if position < size:
            file.truncate(position)


def _byte(file: BinaryIO, position: int) -> bytes:
    file.seek(position)
    return file.read(1)
