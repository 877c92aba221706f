"""The process of one worker: `python -m pipeline.tune STUDY …`, started by `pipe tune` and stopped with it.

A trial is an ordinary run up to training, pruned early if other trials are better. Validation values are read from the
growing `metrics.jsonl` of the training.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial

from pipeline.contract.config import Config, override_config
from pipeline.contract.results import NewLines
from pipeline.contract.run import Run
from pipeline.display import Display
from pipeline.executors.executor import check_config
from pipeline.history import Project, find_project, load_history, lock_run
from pipeline.plan import describe_changes
from pipeline.run import resume_run, run_pipeline, start_fork_server
from pipeline.system.errors import (
    ConfigError,
    DataError,
    Interrupted,
    PipelineError,
    Pruned,
    ResourceError,
    StageError,
    write_error,
)
from pipeline.system.processes import TERMINATED, raise_interrupt, watch_parent
from pipeline.tune.record import (
    StudyFile,
    read_study,
    study_folder,
    study_name,
    study_parts,
    study_trials,
    trial_value,
    tuned_metric,
)
from pipeline.tune.search import TRIAL_STEPS, Claim, Study, TrialResult, as_overrides, search_space
from pipeline.work import RunRequest


class TrialMonitor(Display):
    """A display without output that reports the value of each validation to the study and prunes the trial."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        super().__init__(live=False)
        self._trial, self._metric = trial, metric
        self._reader = MetricReader(metric)
        reported = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._reported = set(reported)  # by an earlier worker

    def report(self, text: str) -> None:
        """Ignored: the logs of the run have it."""

    def failed(self, error: PipelineError) -> None:
        """Ignored: the reason is part of the trial's line."""

    def end(self, text: str) -> None:
        """Ignored: the last validations are reported when the step is complete."""

    def tick(self) -> None:
        assert self.run is not None
        if self._step == "train" and self.report_validations(self.run.partial("train")) and self._trial.should_prune():
            raise Pruned(f"after validation {max(self._reported)}")

    def report_validations(self, directory: Path) -> bool:
        """Report new validations; return whether there were any."""
        has_new = False
        for number, value in self._reader.read(directory / "metrics.jsonl"):
            if value is None:
                names = ", ".join(self._reader.names)
                raise Pruned(
                    f"validation has no finite `{self._metric}` (it has {names}); "
                    "to fix it: name one of these as tune.metric"
                )
            if number not in self._reported:
                self._reported.add(number)
                self._trial.report(value, number)
                has_new = True
        return has_new


def run_trial(claim: Claim, project: Project, base: Config, request: RunRequest) -> tuple[TrialResult, Run | None]:
    """Run a trial; its errors are its result, errors of the machine stop the search."""
    try:
        config = override_config(base, as_overrides(claim.values), source="trial")
        check_config(config)
    except ConfigError as error:
        return TrialResult("refused", reason=str(error).removeprefix("trial: ")), None
    monitor = TrialMonitor(claim.trial, tuned_metric(base))
    try:
        return _train_trial(monitor, project, config, replace(request, steps=TRIAL_STEPS, trial=claim.number))
    except Pruned as error:
        result = TrialResult("pruned", reason=str(error))
    except ResourceError:
        raise
    except PipelineError as error:
        result = TrialResult("failed", reason=str(error), caused_by_settings=isinstance(error, ConfigError | DataError))
    return result, find_trial_run(project, request.study, claim.number)


def find_trial_run(project: Project, study: str, number: int) -> Run | None:
    entry = study_trials(study, load_history(project.runs)).get(number)
    return entry[0] if entry else None


def _train_trial(
    monitor: TrialMonitor, project: Project, config: Config, request: RunRequest
) -> tuple[TrialResult, Run]:
    """Train from the start, or from the checkpoint of an earlier worker."""
    assert request.trial is not None
    run = find_trial_run(project, request.study, request.trial)
    if run is None:
        run = run_pipeline(project, config, request, monitor)
    elif (record := run.read().steps.get("train")) is not None and record.status == "pruned":
        return TrialResult("pruned", reason="before its worker was stopped"), run
    else:
        with lock_run(run):
            resume_run(project, run, replace(request, on_changes="restart"), monitor)
    monitor.report_validations(run.output("train"))
    value = trial_value(run, tuned_metric(config))
    assert value is not None, "a validation without the metric prunes the trial"
    return TrialResult("done", value), run


class MetricReader:
    """Reads the value of each validation once, although a resumed training rewrites the file."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._lines = NewLines()
        self._seen: set[int] = set()  # steps
        self.names: tuple[str, ...] = ()  # of all values of a validation

    def read(self, path: Path) -> Iterator[tuple[int, float | None]]:
        """Yield new validations, counted from one, with the value; None if the metric is missing or not finite."""
        for line in self._lines.read(path):
            if "validation" in line and line["step"] not in self._seen:
                self._seen.add(line["step"])
                self.names = tuple(line["validation"])
                yield len(self._seen), line["validation"].get(self._metric)


_POLL_SECONDS = 0.5
_MAX_UNMEASURED_TRIALS = 3  # trials without a single validation


def run_worker(
    body: StudyFile, project: Project, read_config: Callable[[], Config], workers: int, report: Callable[[str], None]
) -> None:
    """Run trials until all trials of the study are finished, by this worker or others."""
    config = _check_unchanged(body, project, read_config())
    request = RunRequest((), study=body.name, cores=max(1, (os.cpu_count() or 1) // workers))
    with start_fork_server(project.root, config, request.cores) as server:
        os.environ.update(server)  # of this process, for its trials
        study = Study(study_folder(project.runs, body.name), config.tune, search_space(config))
        while not study.finished:
            config = _check_unchanged(body, project, read_config())
            claim = study.claim()
            if claim is None:  # other workers may still be killed and abandon a trial
                time.sleep(_POLL_SECONDS)
                continue
            started = time.monotonic()
            result, run = run_trial(claim, project, config, request)
            study.record_result(claim, result)
            report(describe_trial(claim, result, run, time.monotonic() - started, study.best()))
            if result.state == "failed" and nothing_was_measured(study.trials):
                raise StageError(
                    f"no trial reached its first validation in {len(study.trials)} trials: {result.reason}"
                )


def nothing_was_measured(trials: list[FrozenTrial]) -> bool:
    """Whether several trials were trained without a validation, so that not their settings are the cause."""
    trained = [trial for trial in trials if trial.user_attrs.get("state") not in (None, "refused")]
    return len(trained) >= _MAX_UNMEASURED_TRIALS and not any(trial.intermediate_values for trial in trials)


def describe_trial(claim: Claim, result: TrialResult, run: Run | None, seconds: float, best: FrozenTrial | None) -> str:
    """Return the line that is printed for a trial."""
    parts = [f"trial {claim.number}: {result.state}"]
    if result.value is not None:
        parts.append(f"{result.value:#.4g}" + (", the best so far" if best and best.number == claim.number else ""))
    rounded = {name: float(f"{it:.4g}") if isinstance(it, float) else it for name, it in claim.values.items()}
    settings = " ".join(as_overrides(rounded))
    parts.append(f"({settings}; {seconds:.1f} s{f', run {run.id}' if run else ''})")
    return " ".join(parts) + (f": {result.reason}" if result.reason else "")


def _check_unchanged(body: StudyFile, project: Project, config: Config) -> Config:
    """Stop if sources or settings changed, as such trials do not belong to the study."""
    parts = study_parts(config, project)
    if study_name(parts) != body.name:
        raise ConfigError(
            f"{describe_changes(body.parts, parts)} during the search; its trials are kept in study {body.name}, "
            "`pipe tune` starts a new one"
        )
    return config


def main() -> int:
    parser = argparse.ArgumentParser(prog="pipeline.tune", description="one worker of a search")
    parser.add_argument("study")
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True, help="number of workers on this machine")
    parser.add_argument("--errors", type=Path, required=True, help="folder for an error file")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    watch_parent()
    signal.signal(signal.SIGTERM, raise_interrupt)  # another worker can continue the trial
    project = find_project(options.project)
    try:
        body = read_study(project.runs, options.study)
        run_worker(
            body, project, lambda: project.config(options.overrides), options.workers, Display(live=False).report
        )
    except KeyboardInterrupt as interrupt:
        return TERMINATED if interrupt.args else Interrupted.exit_code  # SIGTERM's has an argument
    except PipelineError as error:
        write_error(error, options.errors)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
