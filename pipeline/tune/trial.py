"""One trial: an ordinary run up to training, watched while it trains and ended early where others did better."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import optuna

from pipeline.display import Display
from pipeline.history import load_history
from pipeline.project import Project
from pipeline.runner import Order, check_config, resume_road, run_road
from pipeline.spec.config import Config, override_config
from pipeline.spec.errors import ConfigError, DataError, PipelineError, Pruned, ResourceError
from pipeline.spec.run import Run
from pipeline.tune.curve import Curve
from pipeline.tune.record import outcome_of, trials_of
from pipeline.tune.space import STEPS, as_overrides
from pipeline.tune.study import Claim, Ending


class Watch(Display):
    """Says nothing; tells the study each epoch's value and asks whether to go on."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        super().__init__(live=False)
        self._trial, self._metric = trial, metric
        self._curve = Curve(metric)
        found = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._reported = set(found)  # by whoever had the trial before

    def say(self, text: str) -> None:
        """The run's own logs have it all."""

    def failed(self, error: PipelineError) -> None:
        """Why it failed is part of the trial's line."""

    def end(self, text: str) -> None:
        """What was written last is reported when the step is whole."""

    def tick(self) -> None:
        assert self._run is not None
        if self._step == "train" and self.report(self._run.partial("train")) and self._trial.should_prune():
            raise Pruned(f"after epoch {max(self._reported)}")

    def report(self, directory: Path) -> bool:
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


def run_trial(claim: Claim, project: Project, base: Config, order: Order) -> tuple[Ending, Run | None]:
    """Whatever is the trial's own fault is how it ends; what is the machine's stops the search, which can go on."""
    try:
        config = override_config(base, as_overrides(claim.values), source="trial")
        check_config(config)
    except ConfigError as error:
        return Ending("refused", reason=str(error).removeprefix("trial: ")), None
    watch = Watch(claim.trial, base.tune.metric)
    try:
        return _train(watch, project, config, replace(order, wanted=STEPS, trial=claim.number))
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


def _train(watch: Watch, project: Project, config: Config, order: Order) -> tuple[Ending, Run]:
    """From the start, or from the checkpoint its earlier worker left."""
    assert order.trial is not None
    run = run_of(project, order.study, order.trial)
    if run is None:
        run = run_road(project, config, order, watch)
    elif _pruned(run):
        return Ending("pruned", reason="before its worker was gone"), run
    else:
        resume_road(project, run, order, watch)
    watch.report(run.output("train"))
    value = outcome_of(run, config.tune.metric)
    assert value is not None, "an epoch without it ended the trial"
    return Ending("done", value), run


def _pruned(run: Run) -> bool:
    record = run.read().steps.get("train")
    return record is not None and record.status == "pruned"
