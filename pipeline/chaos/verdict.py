"""The verdict of `pipe chaos`: recovery times per kind of kill, lost samples, and a comparison with the reference."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.contract.chaos import ChaosEvent, Kill
from pipeline.contract.run import Run
from pipeline.system.errors import PipelineError
from pipeline.system.files import read_object
from pipeline.verify import ledger_verification

_STARTING, _OTHER = "while processes start", "at any moment: another worker"
_INSIDE = {
    "step": "at a step's end",
    "ledger": "inside the ledger's append",
    "write": "inside a checkpoint's write",
    "rename": "before a checkpoint's rename",
    "renamed": "after a checkpoint's rename",
}
_MOMENTS = {
    "worker": "at any moment: first worker",
    "launcher": "at any moment: launcher",
    "server": "at any moment: the fork server",
    "pipe": "at any moment: pipe itself",
}
_FAULTS = {
    "pause": "a process is stopped for a while",
    "disk": "the disk is full at a checkpoint",
    "truncated": "a truncated shard",
    "flipped": "a shard with a flipped byte",
    "clock": "the clock jumps by an hour",
    "half-open": "connections are half-open",
    "store": "first worker and its launcher at once",
    "resume": "two `pipe run --resume` at once",
    "best": "the best checkpoint is damaged",
    "zeroed": "a file of the run is NULs",
    "unreadable": "another run cannot be read",
}
_OTHERS = tuple(text for who, text in _MOMENTS.items() if who != "worker")
_KILLS = (*_INSIDE.values(), _MOMENTS["worker"], _OTHER, *_OTHERS, _STARTING)
PLACES = (*_KILLS, *_FAULTS.values())


@dataclass(frozen=True)
class KillResult:
    """One kill and the seconds until the next step; None if the next kill came first."""

    place: str
    step: int
    seconds: float | None


@dataclass(frozen=True)
class Training:
    """One training with kills, compared with the reference training."""

    run: str  # its path
    made: tuple[KillResult, ...]
    by_hand: tuple[str, ...]  # why training ended and had to be resumed by hand, each time
    fault: str  # why it did not finish
    lost: int
    repeated: int
    ledger: str  # the first error in it
    weights: str  # SHA-256
    differs: str  # the first difference to the reference
    lost_best: int = 0  # step of the best checkpoint that was damaged, where the weights are of another step therefore

    @property
    def held(self) -> bool:
        return not (self.fault or self.by_hand or self.lost or self.repeated or self.ledger or self.differs)


def describe_place(kill: Kill) -> str:
    if kill.fault != "kill":
        return _FAULTS[kill.fault]
    if kill.place == "start":
        return _STARTING
    if kill.place != "moment":
        return _INSIDE[kill.place]
    return _OTHER if kill.rank else _MOMENTS[kill.who]


def kill_results(kills: Sequence[Kill], events: Sequence[ChaosEvent], ended: float | None) -> Iterator[KillResult]:
    """Yield a result per kill; `ended` is when training finished, as no step may follow the last kill."""
    for event, recovery_seconds in recoveries(events, ended):
        kill = kills[event.number]
        yield KillResult(describe_place(kill), kill.step, recovery_seconds)


def recoveries(events: Sequence[ChaosEvent], ended: float | None) -> Iterator[tuple[ChaosEvent, float | None]]:
    """Yield each kill with the seconds until the next step: of processes started after it, or of one that survived."""
    kills = [event for event in events if event.event == "kill"]
    for event, following in itertools.zip_longest(kills, kills[1:]):
        next_kill_time = following.time if following else math.inf
        steps = [step.time for step in events if step.event == "step" and event.time < step.born < next_kill_time]
        steps += [end.time for end in events if end.event == "recovered" and end.number == event.number]
        recovered_at = min(steps) if steps else ended if following is None else None
        yield event, recovered_at - event.time if recovered_at else None


def recovery_rows(trainings: Sequence[Training]) -> list[dict[str, Any]]:
    """Return a row per kind of kill. A kill followed by another one counts as recovered if the other does."""
    rows = []
    for place in PLACES:
        kills = [(training, kill) for training in trainings for kill in training.made if kill.place == place]
        if not kills:
            continue
        stuck = sum(
            bool(training.fault) and kill is training.made[-1] and kill.seconds is None for training, kill in kills
        )
        seconds = [kill.seconds for _, kill in kills if kill.seconds is not None]
        rows.append(_row(place, len(kills), len(kills) - stuck, seconds))
    return rows


def _row(place: str, kills: int, recoveries: int, seconds: Sequence[float]) -> dict[str, Any]:
    p50, longest = (statistics.median(seconds), max(seconds)) if seconds else (None, None)
    return {"place": place, "kills": kills, "recoveries": recoveries, "p50_seconds": p50, "max_seconds": longest}


@dataclass(frozen=True)
class Verdict:
    requested_kills: int
    steps: int
    processes: int
    trainings: tuple[Training, ...]

    @property
    def kills(self) -> int:
        return sum(len(training.made) for training in self.trainings)

    @property
    def held(self) -> bool:
        return self.kills == self.requested_kills and all(training.held for training in self.trainings)

    @property
    def lost(self) -> int:
        return sum(training.lost for training in self.trainings)

    @property
    def repeated(self) -> int:
        return sum(training.repeated for training in self.trainings)

    @property
    def equal(self) -> bool:
        return all(not training.differs and not training.fault for training in self.trainings)

    @property
    def _exception(self) -> str:
        steps = [str(training.lost_best) for training in self.trainings if training.lost_best]
        return f", except that the best checkpoint, of step {', '.join(steps)}, was damaged" if steps else ""

    def sentence(self) -> str:
        """Return the verdict in one sentence."""
        if not self.held:
            return "did NOT hold: " + "; ".join(self._complaints())
        times = "a training" if len(self.trainings) == 1 else f"{len(self.trainings)} trainings"
        return (
            f"held: {self.kills} kills in {times} of {self.steps} steps on {self.processes} processes; every sample "
            "was used exactly once in each epoch, and the weights are equal to the reference training to the bit"
        ) + self._exception

    def table(self) -> list[dict[str, Any]]:
        """Return a row per kind of kill, and one for all."""
        rows = recovery_rows(self.trainings)
        seconds = [kill.seconds for training in self.trainings for kill in training.made if kill.seconds is not None]
        all_kills = _row("all", self.kills, sum(row["recoveries"] for row in rows), seconds)
        return [
            {name.replace("_seconds", " s"): _short(value) for name, value in row.items()} for row in (*rows, all_kills)
        ]

    def text(self) -> str:
        """Return totals over all trainings, commands to inspect failed ones, and the verdict."""
        lines = [
            f"samples lost      {self.lost}",
            f"samples repeated  {self.repeated}",
            f"final weights     {'equal' if self.equal else 'DIFFERENT'}{self._exception}",
        ]
        for training in self.trainings:
            if not training.held:
                run = training.run
                lines += [
                    f"run               {run}",
                    f"inspect           pipe verify {run}; pipe logs train --run {run}",
                ]
        return "\n".join([*lines, self.sentence()])

    def as_json(self) -> dict[str, Any]:
        counts = {"kills": self.kills, "lost": self.lost, "repeated": self.repeated, "equal": self.equal}
        summary = {"held": self.held, "verdict": self.sentence(), "steps": self.steps, "processes": self.processes}
        places, trainings = recovery_rows(self.trainings), [asdict(training) for training in self.trainings]
        return {**summary, **counts, "places": places, "trainings": trainings}

    def _complaints(self) -> Iterator[str]:
        for training in self.trainings:
            if training.by_hand:
                yield f"training had to be resumed by hand {len(training.by_hand)} times: {training.by_hand[0]}"
            if training.lost or training.repeated:
                yield f"{training.lost} samples were lost and {training.repeated} repeated"
            yield from filter(None, (training.fault, training.ledger, training.differs))
        if missing := self.requested_kills - self.kills:
            yield f"{missing} of the kills were not made"


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


_COMPARED = ("step", "loss", "grad_norm", "lr", "validation")  # of the training log; without values that depend on time


def compare_training(
    run: Run, reference: Run, results: tuple[KillResult, ...], by_hand: tuple[str, ...], fault: str
) -> Training:
    """Count samples from the ledger and compare the training with the reference."""
    lost = repeated = lost_best = 0
    ledger = weights = differs = ""
    if not fault:
        try:
            verification = ledger_verification(run)
            lost, repeated, ledger = verification.lost, verification.repeated, verification.fault
        except PipelineError as error:
            ledger = str(error)
        weights = weights_digest(run)
        faults = {kill.place for kill in results}
        if _FAULTS["best"] in faults and weights != weights_digest(reference):
            lost_best = lost_best_step(run, reference)
        differs = difference(run, reference, lacks_lines=_FAULTS["zeroed"] in faults, lost_best=lost_best)
    return Training(str(run.path), results, by_hand, fault, lost, repeated, ledger, weights, differs, lost_best)


def lost_best_step(run: Run, reference: Run) -> int:
    """Return the step that the summary names as the lost best; 0 if the reference has another loss there, or none."""
    lost = read_object(run.output("train") / "summary.json").get("lost_best") or {"step": 0}
    losses = {row["step"]: row["validation"]["loss"] for row in compared_values(reference) if "validation" in row}
    return int(lost["step"]) if lost.get("loss") == losses.get(lost["step"], lost) else 0


def difference(run: Run, reference: Run, lacks_lines: bool = False, lost_best: int = 0) -> str:
    """Describe the first different line of the training log, or different weights.

    The log may lack lines if it was damaged, and the weights may differ if the best ones were.
    """
    expected_rows, rows = compared_values(reference), compared_values(run)
    if lacks_lines:
        names = [(row["step"], *row) for row in rows]
        expected_rows = [row for row in expected_rows if (row["step"], *row) in names]
    for expected, actual in zip(expected_rows, rows, strict=False):
        if expected != actual:
            return f"training differs from the reference from step {actual['step']} on: {expected} became {actual}"
    if len(rows) != len(expected_rows):
        return f"the training log has {len(rows)} lines, the reference {len(expected_rows)}"
    equal = lost_best or weights_digest(run) == weights_digest(reference)
    return "" if equal else "the final weights differ from the reference"


def weights_digest(run: Run) -> str:
    return run.read().steps["train"].outputs["model.safetensors"]


def training_log(run: Run) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (run.output("train") / "metrics.jsonl").read_text().splitlines()]


def compared_values(run: Run) -> list[dict[str, Any]]:
    return [{name: row[name] for name in _COMPARED if name in row} for row in training_log(run)]
