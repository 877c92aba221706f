"""One worker: takes trials until there are none, and says a line for each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from optuna.trial import FrozenTrial

from pipeline.plan import changes
from pipeline.project import Project
from pipeline.runner import Order
from pipeline.spec.config import Config
from pipeline.spec.errors import ConfigError, StageError
from pipeline.spec.run import Run
from pipeline.tune.record import StudyFile, folder_of, identity, name_of
from pipeline.tune.space import as_overrides, distributions
from pipeline.tune.study import Claim, Ending, Study
from pipeline.tune.trial import run_trial

_POLL_SECONDS = 0.5
_HOPELESS = 3  # trials in which not one epoch was measured


def work(
    body: StudyFile, project: Project, read_config: Callable[[], Config], workers: int, say: Callable[[str], None]
) -> None:
    """Until every trial of the study is finished, be it by this worker or by others."""
    config = _unchanged(body, project, read_config())
    study = Study(folder_of(project.runs, body.name), config.tune, distributions(config))
    order = Order((), study=study.name, cores=max(1, (os.cpu_count() or 1) // workers))
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
            f"{changes(body.parts, parts)} while the search went on; trials so far are kept with study {body.name}, "
            "`pipe tune` again begins a new one"
        )
    return config
