"""One trial: an ordinary run up to training, watched while it trains and ended early where others did better.

The validation values of a training under way, read from its growing `metrics.jsonl`.

One worker: takes trials until there are none, and says a line for each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError, DataError, PipelineError, Pruned, ResourceError, StageError
from pipeline.contract.run import Run
from pipeline.display import Display
from pipeline.history import Project, load_history
from pipeline.plan import describe_changes
from pipeline.runner import RunRequest, check_config, resume_run, run_pipeline
from pipeline.tune.record import StudyFile, folder_of, identity, name_of, outcome_of, trials_of
from pipeline.tune.search import STEPS, as_overrides, distributions
from pipeline.tune.study import Claim, Ending, Study


class Watch(Display):
    """Says nothing; tells the study each epoch's value and asks whether to go on."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        super().__init__(live=False)
        self._trial, self._metric = trial, metric
        self._curve = Curve(metric)
        found = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._reported = set(found)  # by whoever had the trial before

    def report(self, text: str) -> None:
        """The run's own logs have it all."""

    def failed(self, error: PipelineError) -> None:
        """Why it failed is part of the trial's line."""

    def end(self, text: str) -> None:
        """What was written last is reported when the step is whole."""

    def tick(self) -> None:
        assert self._run is not None
        if self._step == "train" and self.report_epochs(self._run.partial("train")) and self._trial.should_prune():
            raise Pruned(f"after epoch {max(self._reported)}")

    def report_epochs(self, directory: Path) -> bool:
        """Whether there was anything to tell."""
        told = False
        for epoch, value in self._curve.read(directory / "metrics.jsonl"):
            if value is None:
                raise Pruned(f"validation tells no finite `{self._metric}`; is that the name tune.metric should have?")
            if epoch not in self._reported:
                self._reported.add(epoch)
                self._trial.report(value, epoch)
                told = True
        return told


def run_trial(claim: Claim, project: Project, base: Config, order: RunRequest) -> tuple[Ending, Run | None]:
    """Whatever is the trial's own fault is how it ends; what is the machine's stops the search, which can go on."""
    try:
        config = override_config(base, as_overrides(claim.values), source="trial")
        check_config(config)
    except ConfigError as error:
        return Ending("refused", reason=str(error).removeprefix("trial: ")), None
    watch = Watch(claim.trial, base.tune.metric)
    try:
        return _train(watch, project, config, replace(order, steps=STEPS, trial=claim.number))
    except Pruned as error:
        ending = Ending("pruned", reason=str(error))
    except ResourceError:
        raise
    except PipelineError as error:
        ending = Ending("failed", reason=str(error), blamed=isinstance(error, ConfigError | DataError))
    return ending, run_of(project, order.study, claim.number)


def run_of(project: Project, study: str, number: int) -> Run | None:
    found = trials_of(study, load_history(project.runs)).get(number)
    return found[0] if found else None


def _train(watch: Watch, project: Project, config: Config, order: RunRequest) -> tuple[Ending, Run]:
    """From the start, or from the checkpoint its earlier worker left."""
    assert order.trial is not None
    run = run_of(project, order.study, order.trial)
    if run is None:
        run = run_pipeline(project, config, order, watch)
    elif _pruned(run):
        return Ending("pruned", reason="before its worker was gone"), run
    else:
        resume_run(project, run, order, watch)
    watch.report(run.output("train"))
    value = outcome_of(run, config.tune.metric)
    assert value is not None, "an epoch without it ended the trial"
    return Ending("done", value), run


def _pruned(run: Run) -> bool:
    record = run.read().steps.get("train")
    return record is not None and record.status == "pruned"


class Curve:
    """Each epoch's value once, though a resumed training writes its file anew."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._file, self._place = 0, 0  # inode, and how much of it is read
        self._known: set[int] = set()

    def read(self, path: Path) -> Iterator[tuple[int, float | None]]:
        """(epoch, counted from one, value) of what was added; None where the metric is missing or not finite."""
        for line in self._added(path):
            if "validation" in line and line["epoch"] not in self._known:
                self._known.add(line["epoch"])
                yield line["epoch"] + 1, line["validation"].get(self._metric)

    def _added(self, path: Path) -> list[dict[str, Any]]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            file.seek(self._place if inode == self._file else 0)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # a half line is read again when it is whole
            self._file, self._place = inode, file.tell() - len(data) + len(whole)
        return [json.loads(line) for line in whole.splitlines()]


_POLL_SECONDS = 0.5
_HOPELESS = 3  # trials in which not one epoch was measured


def work(
    body: StudyFile, project: Project, read_config: Callable[[], Config], workers: int, say: Callable[[str], None]
) -> None:
    """Until every trial of the study is finished, be it by this worker or by others."""
    config = _unchanged(body, project, read_config())
    study = Study(folder_of(project.runs, body.name), config.tune, distributions(config))
    order = RunRequest((), study=study.name, cores=max(1, (os.cpu_count() or 1) // workers))
    while not study.finished:
        config = _unchanged(body, project, read_config())
        claim = study.claim()
        if claim is None:  # the others may yet be killed and leave a trial
            time.sleep(_POLL_SECONDS)
            continue
        started = time.monotonic()
        ending, run = run_trial(claim, project, config, order)
        study.tell(claim, ending)
        say(describe(claim, ending, run, time.monotonic() - started, study.best()))
        if ending.state == "failed" and hopeless(study.trials):
            raise StageError(f"no trial got through its first epoch, {len(study.trials)} were tried; {ending.reason}")


def hopeless(trials: list[FrozenTrial]) -> bool:
    """Several were trained and none got anywhere: what is wrong is not their settings."""
    trained = [trial for trial in trials if trial.user_attrs.get("state") not in (None, "refused")]
    return len(trained) >= _HOPELESS and not any(trial.intermediate_values for trial in trials)


def describe(claim: Claim, ending: Ending, run: Run | None, seconds: float, best: FrozenTrial | None) -> str:
    """A trial's line."""
    words = [f"trial {claim.number}: {ending.state}"]
    if ending.value is not None:
        words.append(f"{ending.value:.4f}" + (", the best so far" if best and best.number == claim.number else ""))
    settings = " ".join(as_overrides({name: shown(value) for name, value in claim.values.items()}))
    words.append(f"({settings}; {seconds:.1f} s{f', run {run.id}' if run else ''})")
    return " ".join(words) + (f": {ending.reason}" if ending.reason else "")


def shown(value: Any) -> Any:
    """Four digits are enough for people."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _unchanged(body: StudyFile, project: Project, config: Config) -> Config:
    """A file edited in the meantime must not be mixed into the study."""
    parts = identity(config, project)
    if name_of(parts) != body.name:
        raise ConfigError(
            f"{describe_changes(body.parts, parts)} while the search went on; trials so far are kept with study {body.name}, "
            "`pipe tune` again begins a new one"
        )
    return config
