"""Continue the training of an earlier run from its checkpoint in a new run, with other settings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.contract.config import Config, override_config
from pipeline.contract.restarts import newest_attempt, read_events, record_event
from pipeline.contract.run import Run
from pipeline.history import Project, find_run, link_or_copy
from pipeline.system.errors import ConfigError
from pipeline.system.files import digest_file

# The order of samples, or the model, depends on these, and a checkpoint is of one order and one model.
_FIXED = ("name", "task", "train.batch_size", "train.seed", "train.max_samples", "train.checkpoints")
_RECORDS = ("ledger.jsonl", "metrics.jsonl")  # training drops their lines of later steps


@dataclass(frozen=True)
class StartingPoint:
    """The checkpoint of a run from which another run continues."""

    source: Run
    step: int

    def __str__(self) -> str:
        """Return what run.json of the new run records, and its key for training contains."""
        return f"{self.source.id} step {self.step} {digest_file(self._folder / 'manifest.json')[:12]}"

    @property
    def _folder(self) -> Path:
        return _checkpoints(self.source) / f"step-{self.step:08d}"

    def copy_to(self, run: Run) -> None:
        """Give a new run the checkpoints up to this one, and the records of their steps, as if it had made them."""
        target = run.partial("train") / "checkpoints"
        shutil.rmtree(target, ignore_errors=True)  # of an attempt that was killed here
        target.mkdir(parents=True)
        for step in (step for step in _steps(self.source) if step <= self.step):
            name = f"step-{step:08d}"
            shutil.copytree(_checkpoints(self.source) / name, target / name, copy_function=link_or_copy)
        for record in _RECORDS:
            if (path := _training_folder(self.source) / record).is_file():
                shutil.copyfile(path, run.partial("train") / record)
        if not read_events(run.path):  # so that attempts are numbered on from those in the ledger
            record_event(run.path, event="launch", attempt=newest_attempt(read_events(self.source.path)))


def find_starting_point(project: Project, name: str) -> StartingPoint:
    """Return the checkpoint that `RUN` or `RUN@STEP` names: the newest one, or the newest one up to a step."""
    run_name, _, limit = name.partition("@")
    if limit and not limit.isdecimal():
        raise ConfigError(f"--continue {name}: write the step as a number, as in {run_name}@300")
    source = find_run(project.runs, run_name)
    record = source.read().steps.get("train")
    if record is not None and record.reused_from:
        source = find_run(project.runs, record.reused_from)
    if source.config.train.checkpoints:
        raise ConfigError(
            f"--continue {name}: the checkpoints of run {source.id} are in train.checkpoints="
            f"{source.config.train.checkpoints}; only those inside a run can be continued"
        )
    steps = _steps(source)
    chosen = [step for step in steps if not limit or step <= int(limit)]
    if not chosen:
        others = f"; there are steps {', '.join(map(str, steps))}" if steps else ""
        raise ConfigError(f"--continue {name}: run {source.id} has no checkpoint{' so early' if steps else ''}{others}")
    return StartingPoint(source, chosen[-1])


def recorded_starting_point(project: Project, recorded: str) -> StartingPoint:
    """Return the starting point that run.json of a run records."""
    name, _, step, _ = recorded.split()
    return StartingPoint(find_run(project.runs, name), int(step))


def continued_config(start: StartingPoint, overrides: Sequence[str]) -> Config:
    """Return the settings of the earlier run with overrides, which must leave its order of samples and its model."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in _FIXED or key.partition(".")[0] in ("model", "prepare"):
            raise ConfigError(
                f"{key}: the checkpoint is of another {'model' if key.startswith('model') else 'order of samples'}; "
                f"`pipe run {override}` trains from the beginning"
            )
    if not overrides:
        raise ConfigError(
            f"--continue {start.source.id}: nothing changes; name settings, such as train.epochs=20 or train.lr=0.0001"
        )
    return override_config(start.source.config, overrides)


def _training_folder(run: Run) -> Path:
    partial = run.partial("train")
    return partial if partial.is_dir() else run.output("train")


def _checkpoints(run: Run) -> Path:
    return _training_folder(run) / "checkpoints"


def _steps(run: Run) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in _checkpoints(run).glob("step-*/manifest.json"))
