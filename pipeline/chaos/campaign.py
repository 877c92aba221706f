"""The whole of `pipe chaos`: the user's training once undisturbed, then under attack, and both beside each other.

The user's own training made small: what `pipe chaos` overrides, as a pure function of configuration and data.

Which kills `pipe chaos` makes: a pure function of how many, the seed, the steps and the processes.

What is said of every kill while training is under attack.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.chaos.attack import Attack, Due, Timing, as_scheduled, kills_of, never
from pipeline.chaos.verdict import Made, Training, journal, judge, made
from pipeline.contract.attempts import ChaosEvent, Kill, Place, Record
from pipeline.contract.config import Config, override_config
from pipeline.contract.errors import ConfigError, PipelineError, StageError
from pipeline.contract.run import Run
from pipeline.history import Project, create_run, link_outputs, write_record

_EPOCHS = 2  # the fewest that have an end in their midst
_BATCH_SIZE = 64  # in place of `auto`, which may find another one each time
_NEVER_TIRED = 1000  # restarts in a row: kills at one place come often without a new checkpoint


def small(config: Config, samples: int, kills: int, words: list[str]) -> Config:
    """A checkpoint at every step, and as many steps as there are kills at a step's end; `words` come last."""
    train = config.train
    batch_size = _BATCH_SIZE if train.batch_size == "auto" else train.batch_size
    per_epoch = max(FEWEST_STEPS, step_ends(kills)) // _EPOCHS
    wanted = per_epoch * batch_size - (batch_size > 1)  # so that batches differ in size
    epochs = _EPOCHS if wanted <= samples else -(-_EPOCHS * per_epoch * batch_size // samples)
    found = override_config(
        config,
        [
            f"train.batch_size={batch_size}",
            f"train.samples={wanted if wanted < samples else 0}",
            f"train.epochs={max(_EPOCHS, epochs)}",
            f"train.restarts={_NEVER_TIRED}",
            "train.checkpoint_every=1",
            "train.checkpoints=",
            "train.log_every=1",
            "train.nodes=1",
            "train.rendezvous=",
            "train.patience=0",
            "train.trace=false",
            "train.balance=equal",
            "train.deterministic=true",
            *words,
        ],
    )
    _check_comparable(found)
    return found


def _check_comparable(config: Config) -> None:
    """Two trainings that nobody disturbs have to end with the same bits."""
    train = config.train
    if train.sync == "parameter_server":
        raise ConfigError(
            "pipe chaos compares weights to the bit, and with train.sync=parameter_server they depend on who is "
            "faster; add train.sync=allreduce"
        )
    if train.balance == "auto" or not train.deterministic:
        raise ConfigError(
            "pipe chaos compares weights to the bit: leave train.balance=equal and train.deterministic=true"
        )


FEWEST_STEPS = 8  # of a training, so that a kill in its midst has a before and an after
ROOM_STEPS = 3  # that training may go on while a kill from outside is on its way

# What is dealt, again and again, until there are as many kills as were asked for.
DEALT = (
    "step", "write", "rename", "renamed", "ledger", "pipe", "other worker", "launcher", "step", "first worker",
    "start", "step", "write", "step", "step", "renamed", "step", "rename", "step", "step",
)  # fmt: skip
_PLACES: tuple[Place, ...] = ("start", "moment", "step", "ledger", "write", "rename", "renamed")  # as a step meets them


def schedule(kills: int, seed: int, steps: int, processes: int) -> tuple[Kill, ...]:
    """In the order they are made. Where there are as many kills at step ends as steps, every step's end has one."""
    dealt = [DEALT[i % len(DEALT)] for i in range(kills)]
    count, drawn = Counter(dealt), Counter[str]()
    random_numbers = random.Random(f"{kills} {seed} {steps} {processes}")
    found = []
    for kind in dealt:
        turn = drawn[kind]
        drawn[kind] += 1
        found.append(_kill(kind, turn, count[kind], steps, processes, random_numbers))
    return tuple(sorted(found, key=lambda kill: (kill.step, _PLACES.index(kill.place))))


def _kill(kind: str, turn: int, of: int, steps: int, processes: int, draw: random.Random) -> Kill:
    if kind == "step":
        return Kill(place="step", step=1 + (turn * steps + steps // 2) // of, rank=turn % processes)
    if kind == "start":
        return Kill(place="start", step=draw.randint(1, steps), share=draw.random())
    if kind in ("ledger", "write", "rename", "renamed"):
        place: Any = kind
        return Kill(place=place, step=draw.randint(1, steps), rank=draw.randrange(processes))
    step = draw.randint(1, max(1, steps - ROOM_STEPS))
    kill = Kill(place="moment", step=step, hold=step + ROOM_STEPS, share=draw.random())
    if kind in ("launcher", "pipe"):
        return kill.model_copy(update={"who": kind})
    rank = draw.randrange(1, processes) if kind == "other worker" and processes > 1 else 0
    return kill.model_copy(update={"rank": rank})


def step_ends(kills: int) -> int:
    """How many of so many kills stand at the end of a step."""
    return sum(DEALT[i % len(DEALT)] == "step" for i in range(kills))


Say = Callable[[str], None]


class Teller:
    """A line for each kill, when it is known how long training took to come back."""

    def __init__(self, kills: Sequence[Kill], before: int, total: int, say: Say) -> None:
        self._kills, self._before, self._total, self._say = kills, before, total, say
        self._told = 0

    def __call__(self, events: Sequence[ChaosEvent]) -> None:
        found = list(made(self._kills, events, None))
        count = len(kills_of(events))
        while self._told < count and (found[self._told].seconds is not None or self._told + 1 < count):
            self._say(line(found[self._told], self._before + self._told + 1, self._total))
            self._told += 1


def line(one: Made, number: int, total: int) -> str:
    back = "the next kill came first" if one.seconds is None else f"next step after {one.seconds:.1f} s"
    return f"kill {number} of {total}: {one.place}, from step {one.step} on: {back}"


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

    def attack(self, run: Run, kills: Sequence[Kill], due: Due, told: Callable[[Sequence[ChaosEvent]], None]) -> Attack:
        record = Record(run.path / "chaos")
        record.schedule(kills)
        patience = run.config.train.timeout_seconds + _PATIENCE_SECONDS
        return Attack(self.typed, run, record, due, patience, told)
