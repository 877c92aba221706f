"""What became of the kills: a row for every kind of place, and whether everything held.

A disturbed training beside the undisturbed one: samples are counted, curves and weights compared.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.contract.attempts import ChaosEvent, Kill
from pipeline.contract.errors import PipelineError
from pipeline.contract.run import Run
from pipeline.verify import prove_run

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
    "pipe": "at any moment: pipe itself",
}
PLACES = (*_INSIDE.values(), _MOMENTS["worker"], _OTHER, _MOMENTS["launcher"], _MOMENTS["pipe"], _STARTING)


@dataclass(frozen=True)
class Made:
    """One kill, and how long until training had made its next step; None where the next kill came first."""

    place: str
    step: int
    seconds: float | None


@dataclass(frozen=True)
class Row:
    place: str
    kills: int
    recoveries: int
    p50_seconds: float | None
    max_seconds: float | None


@dataclass(frozen=True)
class Training:
    """One disturbed training beside the undisturbed one."""

    run: str  # its path
    made: tuple[Made, ...]
    by_hand: int  # resumes that should not have been needed
    fault: str  # why it did not come to its end
    lost: int
    repeated: int
    ledger: str  # what is wrong with it
    weights: str  # SHA-256
    differs: str  # the first thing that is not as in the undisturbed one

    @property
    def held(self) -> bool:
        return not (self.fault or self.by_hand or self.lost or self.repeated or self.ledger or self.differs)


def place_of(kill: Kill) -> str:
    if kill.place == "start":
        return _STARTING
    if kill.place != "moment":
        return _INSIDE[kill.place]
    return _OTHER if kill.rank else _MOMENTS[kill.who]


def made(kills: Sequence[Kill], events: Sequence[ChaosEvent], ended: float | None) -> Iterator[Made]:
    """`ended`: when training was complete; the last kill may leave no step to make."""
    for event, back in recoveries(events, ended):
        kill = kills[event.number]
        yield Made(place_of(kill), kill.step, back)


def recoveries(events: Sequence[ChaosEvent], ended: float | None) -> Iterator[tuple[ChaosEvent, float | None]]:
    """Each kill, and the seconds until the first step of processes born after it and before the next kill."""
    found = [event for event in events if event.event == "kill"]
    for event, following in itertools.zip_longest(found, found[1:]):
        until = following.time if following else math.inf
        steps = [step.time for step in events if step.event == "step" and event.time < step.born < until]
        back = steps[0] if steps else ended if following is None else None
        yield event, back - event.time if back else None


def rows(trainings: Sequence[Training]) -> list[Row]:
    """A kill that the next one overtook is recovered from when that one is."""
    found = []
    for place in PLACES:
        kills = [(training, one) for training in trainings for one in training.made if one.place == place]
        if not kills:
            continue
        stuck = sum(
            bool(training.fault) and one is training.made[-1] and one.seconds is None for training, one in kills
        )
        seconds = [one.seconds for _, one in kills if one.seconds is not None]
        found.append(_row(place, len(kills), len(kills) - stuck, seconds))
    return found


def _row(place: str, kills: int, recoveries: int, seconds: Sequence[float]) -> Row:
    p50, longest = (statistics.median(seconds), max(seconds)) if seconds else (None, None)
    return Row(place, kills, recoveries, p50, longest)


@dataclass(frozen=True)
class Verdict:
    asked: int
    steps: int
    processes: int
    trainings: tuple[Training, ...]

    @property
    def kills(self) -> int:
        return sum(len(training.made) for training in self.trainings)

    @property
    def held(self) -> bool:
        return self.kills == self.asked and all(training.held for training in self.trainings)

    @property
    def lost(self) -> int:
        return sum(training.lost for training in self.trainings)

    @property
    def repeated(self) -> int:
        return sum(training.repeated for training in self.trainings)

    @property
    def equal(self) -> bool:
        return all(not training.differs and not training.fault for training in self.trainings)

    def sentence(self) -> str:
        """It held, or what did not."""
        if not self.held:
            return "did NOT hold: " + "; ".join(self._complaints())
        times = "a training" if len(self.trainings) == 1 else f"{len(self.trainings)} trainings"
        return (
            f"held: {self.kills} kills in {times} of {self.steps} steps on {self.processes} processes; every sample "
            "was used exactly once in each epoch, and the weights are those of the undisturbed training to the bit"
        )

    def table(self) -> list[dict[str, Any]]:
        """A row for every kind of place, and one for all."""
        found = [asdict(row) for row in rows(self.trainings)]
        seconds = [one.seconds for training in self.trainings for one in training.made if one.seconds is not None]
        whole = _row("all", self.kills, sum(row["recoveries"] for row in found), seconds)
        return [
            {name.replace("_seconds", " s"): _short(value) for name, value in row.items()}
            for row in (*found, asdict(whole))
        ]

    def text(self) -> str:
        """What is counted over all trainings; where to look when something did not hold; the verdict last."""
        lines = [
            f"samples lost      {self.lost}",
            f"samples repeated  {self.repeated}",
            f"final weights     {'equal' if self.equal else 'DIFFERENT'}",
        ]
        for training in self.trainings:
            if not training.held:
                run = training.run
                lines += [
                    f"kept              {run}",
                    f"more              pipe verify {run}; pipe log train --run {run}",
                ]
        return "\n".join([*lines, self.sentence()])

    def as_json(self) -> dict[str, Any]:
        counted = {"kills": self.kills, "lost": self.lost, "repeated": self.repeated, "equal": self.equal}
        told = {"held": self.held, "verdict": self.sentence(), "steps": self.steps, "processes": self.processes}
        places = [asdict(row) for row in rows(self.trainings)]
        return {**told, **counted, "places": places, "trainings": [asdict(training) for training in self.trainings]}

    def _complaints(self) -> Iterator[str]:
        for training in self.trainings:
            if training.by_hand:
                yield f"training had to be resumed by hand {training.by_hand} times"
            if training.lost or training.repeated:
                yield f"{training.lost} samples were lost and {training.repeated} repeated"
            yield from filter(None, (training.fault, training.ledger, training.differs))
        if missing := self.asked - self.kills:
            yield f"{missing} of the kills were not made"


def _short(value: Any) -> Any:
    return round(value, 1) if isinstance(value, float) else value


_COMPARED = ("step", "loss", "grad_norm", "lr", "validation")  # of every line of the journal: not what depends on time


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
    return [{name: row[name] for name in _COMPARED if name in row} for row in journal(run)]
