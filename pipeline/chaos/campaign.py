"""The whole of `pipe chaos`: the user's training once undisturbed, then under attack, and both beside each other."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.chaos.attack import Attack, Due, Timing, as_scheduled, never
from pipeline.chaos.comparison import journal, judge
from pipeline.chaos.schedule import ROOM_STEPS, schedule
from pipeline.chaos.small import small
from pipeline.chaos.telling import Say, Teller
from pipeline.chaos.verdict import Training, made
from pipeline.history import create_run, link_outputs, write_record
from pipeline.project import Project
from pipeline.spec.chaos import Event, Kill, Record
from pipeline.spec.config import Config
from pipeline.spec.errors import PipelineError, StageError
from pipeline.spec.run import Run

_PATIENCE_SECONDS = 120.0  # beyond train.timeout_seconds, in which a hanging process is found by itself


@dataclass(frozen=True)
class Reference:
    """The training that nobody disturbed."""

    run: Run
    steps: int
    processes: int
    timing: Timing


@dataclass(frozen=True)
class Campaign:
    """`typed` is the folder that `pipe` is told to work in."""

    project: Project
    typed: Path
    folder: Path
    say: Say

    @classmethod
    def begin(cls, project: Project, typed: Path, say: Say) -> Campaign:
        folder = project.runs / "chaos" / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        folder.mkdir(parents=True)
        return cls(project, typed.resolve(), folder, say)

    @contextlib.contextmanager
    def kept_when_broken(self) -> Iterator[None]:
        try:
            yield
        except PipelineError:
            self.say(f"everything is kept in {self.folder}")
            raise

    def forget(self) -> None:
        shutil.rmtree(self.folder)

    def prepare(self, config: Config) -> Run:
        """A run whose `prepare` all others share."""
        run = create_run(self.folder, config, ("prepare",), parent="")
        self.attack(run, [], never, lambda _: None).train()
        return run

    def small(self, prepared: Run, kills: int, words: Sequence[str]) -> Config:
        data = json.loads((prepared.output("prepare") / "data.json").read_text())
        return small(prepared.config, data["splits"]["train"]["samples"], kills, list(words))

    def undisturbed(self, prepared: Run, config: Config) -> Reference:
        run = self.another(prepared, config)
        attack, began = self.attack(run, [], never, lambda _: None), time.time()
        attack.train()
        summary = json.loads((run.output("train") / "summary.json").read_text())
        first = next(event for event in attack.record.events() if event.event == "step")
        seconds = statistics.median(line["step_seconds"] for line in journal(run) if "step_seconds" in line)
        self.say(f"undisturbed: {summary['steps']} steps, the first after {first.time - began:.1f} s")
        timing = Timing(first.time - began, ROOM_STEPS * seconds)
        return Reference(run, summary["steps"], summary["world_size"], timing)

    def disturbed(self, prepared: Run, reference: Reference, kills: int, seed: int) -> Iterator[Training]:
        """Trainings, until all kills were made or one does not come to its end."""
        left = schedule(kills, seed, reference.steps, reference.processes)
        done = 0
        while left:
            training = self._disturb(prepared, reference, left, done)
            yield training
            if training.fault or not training.made:
                return
            left, done = left[len(training.made) :], done + len(training.made)

    def _disturb(self, prepared: Run, reference: Reference, kills: Sequence[Kill], before: int) -> Training:
        run = self.another(prepared, reference.run.config)
        teller = Teller(kills, before, before + len(kills), self.say)
        attack, fault = self.attack(run, kills, functools.partial(as_scheduled, kills, reference.timing), teller), ""
        try:
            attack.train()
        except StageError as error:
            fault = str(error)
        events = attack.record.events()
        found = tuple(made(kills, events, None if fault else time.time()))
        return judge(run, reference.run, found, attack.by_hand, fault)

    def another(self, prepared: Run, config: Config) -> Run:
        run = create_run(self.folder, config, ("prepare", "train"), parent=prepared.id)
        record = prepared.read().steps["prepare"]
        link_outputs(prepared, run, record)
        write_record(run, record.model_copy(update={"reused_from": prepared.id, "reason": "prepared once"}))
        return run

    def attack(self, run: Run, kills: Sequence[Kill], due: Due, told: Callable[[Sequence[Event]], None]) -> Attack:
        record = Record(run.path / "chaos")
        record.schedule(kills)
        patience = run.config.train.timeout_seconds + _PATIENCE_SECONDS
        return Attack(self.typed, run, record, due, patience, told)
