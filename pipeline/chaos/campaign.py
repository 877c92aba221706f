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
from typing import Any

from pipeline.chaos.attack import Attack, Due, Timing, as_scheduled, kills_of, never
from pipeline.chaos.schedule import schedule
from pipeline.chaos.small import small
from pipeline.chaos.verdict import Made, Training, made
from pipeline.history import create_run, link_outputs, write_record
from pipeline.ledger import prove_run
from pipeline.project import Project
from pipeline.spec.chaos import Event, Kill, Record
from pipeline.spec.config import Config
from pipeline.spec.errors import PipelineError, StageError
from pipeline.spec.run import Run

_PATIENCE_SECONDS = 120.0  # beyond train.timeout_seconds, in which a hanging process is found by itself
_COMPARED = ("loss", "grad_norm", "lr", "validation")  # of every line of the journal
_ROOM_STEPS = 3
Say = Callable[[str], None]


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
        timing = Timing(first.time - began, _ROOM_STEPS * seconds)
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


class Teller:
    """A line for each kill, when it is known how long training took to come back."""

    def __init__(self, kills: Sequence[Kill], before: int, total: int, say: Say) -> None:
        self._kills, self._before, self._total, self._say = kills, before, total, say
        self._told = 0

    def __call__(self, events: Sequence[Event]) -> None:
        found = list(made(self._kills, events, None))
        count = len(kills_of(events))
        while self._told < count and (found[self._told].seconds is not None or self._told + 1 < count):
            self._say(line(found[self._told], self._before + self._told + 1, self._total))
            self._told += 1


def line(one: Made, number: int, total: int) -> str:
    back = "the next kill came first" if one.seconds is None else f"next step after {one.seconds:.1f} s"
    return f"kill {number} of {total}: {one.place}, from step {one.step} on: {back}"


def judge(run: Run, reference: Run, found: tuple[Made, ...], by_hand: int, fault: str) -> Training:
    """Counted from the ledger, compared with what the undisturbed training left."""
    lost = repeated = 0
    ledger = weights = differs = ""
    if not fault:
        try:
            proof = prove_run(run)
            lost, repeated, ledger = proof.lost, proof.repeated, proof.fault
        except PipelineError as error:
            ledger = str(error)
        weights = weights_of(run)
        differs = difference(run, reference)
    return Training(str(run.path), found, by_hand, fault, lost, repeated, ledger, weights, differs)


def difference(run: Run, reference: Run) -> str:
    """The first line of the journal that is not the same, else the weights."""
    for left, right in zip(curve(reference), curve(run), strict=False):
        if left != right:
            return f"from step {right['step']} on, training went another way than undisturbed: {left} became {right}"
    if len(curve(run)) != len(curve(reference)):
        return f"the journal has {len(curve(run))} lines, and {len(curve(reference))} undisturbed"
    return "" if weights_of(run) == weights_of(reference) else "the final weights differ from the undisturbed ones"


def weights_of(run: Run) -> str:
    return run.read().steps["train"].outputs["model.safetensors"]


def journal(run: Run) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (run.output("train") / "metrics.jsonl").read_text().splitlines()]


def curve(run: Run) -> list[dict[str, Any]]:
    """What of the journal does not depend on time."""
    return [{name: row[name] for name in ("step", *_COMPARED) if name in row} for row in journal(run)]
