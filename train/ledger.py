"""The ledger: which samples every committed step was made of, as they were really handed to the model.

What the ledger's lines prove: which samples every step was made of, against what the order of samples plans.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from pipeline.contract.errors import BundleError
from pipeline.contract.files import unwritable, write_atomic
from pipeline.contract.settings.section import Frozen
from train.batch_order import Indices, Order
from train.chaos_hooks import reached
from train.process_group import Group

LEDGER_FILE = "ledger.jsonl"

_Counted = Annotated[int, Field(ge=1)]


class Line(Frozen):
    """One global step, as it was made."""

    step: _Counted  # steps that are done with it
    epoch: Annotated[int, Field(ge=0)]
    samples: _Counted
    digest: str  # of the samples' numbers, in the order of the batch
    processes: _Counted
    attempt: _Counted


@dataclass(frozen=True)
class Proof:
    """`fault` is empty when every line is the one that was due; the counts hold in any case."""

    steps: int
    epochs: int  # complete ones
    samples: int  # of the split
    lost: int  # uses of a sample that an epoch lacks, over all epochs
    repeated: int  # and those it has too many
    attempts: int
    processes: tuple[int, int]  # fewest and most
    fault: str


def digest_of(ids: Indices) -> str:
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def read_lines(path: Path, growing: bool = False) -> list[Line]:
    """Every line of a ledger; one that is `growing` may end in half a line, which counts for nothing."""
    try:
        rows = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read ({error}); nothing tells which samples were used") from error
    half = rows.pop()
    if half and not growing:
        rows.append(half)
    found = []
    for place, row in enumerate(rows, start=1):
        try:
            found.append(Line.model_validate_json(row))
        except ValidationError as error:
            reason = error.errors()[0]["msg"].lower()
            raise BundleError(f"{path}, line {place}: not a line of the ledger ({reason})") from error
    return found


def prove(lines: Sequence[Line], order: Order, steps: int) -> Proof:
    """Whether the lines are those of the first `steps` steps, and how often each sample was used in each epoch."""
    held = list(_held(lines, order))
    lost, repeated = _count(lines, held, order, steps)
    crews = [line.processes for line in lines] or [0]
    return Proof(
        steps=steps,
        epochs=steps // order.steps_per_epoch,
        samples=order.samples,
        lost=lost,
        repeated=repeated,
        attempts=len({line.attempt for line in lines}),
        processes=(min(crews), max(crews)),
        fault=next(_faults(lines, held, order, steps), ""),
    )


def _held(lines: Sequence[Line], order: Order) -> Iterator[int | None]:
    """For each line the step, counted from 0, whose samples it tells; nothing for samples that no step has."""
    strange: dict[str, int] | None = None
    for line in lines:
        if digest_of(order.batch(line.step - 1)) == line.digest:
            yield line.step - 1
            continue
        if strange is None:
            strange = {digest_of(order.batch(step)): step for step in range(max(one.step for one in lines))}
        yield strange.get(line.digest)


def _count(lines: Sequence[Line], held: Sequence[int | None], order: Order, steps: int) -> tuple[int, int]:
    """Each epoch by itself: a sample it did not use is lost, however often another epoch used it."""
    used: dict[int, list[Indices]] = {order.epoch_of(step): [] for step in range(0, steps, order.steps_per_epoch)}
    for line, step in zip(lines, held, strict=True):
        batches = used.setdefault(order.epoch_of(line.step - 1), [])
        if step is not None:
            batches.append(order.batch(step))
    lost = repeated = 0
    for epoch, batches in used.items():
        counts = _uses(batches, order) - _due(epoch, order, steps)
        lost -= int(counts[counts < 0].sum())
        repeated += int(counts[counts > 0].sum())
    return lost, repeated


def _due(epoch: int, order: Order, steps: int) -> Indices:
    """How often an epoch has to use each sample: once, or, where it is not complete, as far as it got."""
    first = epoch * order.steps_per_epoch
    if first + order.steps_per_epoch <= steps:
        return np.ones(order.samples, np.int64)
    return _uses([order.batch(step) for step in range(first, steps)], order)


def _uses(batches: Sequence[Indices], order: Order) -> Indices:
    found = np.concatenate(batches) if batches else np.empty(0, np.int64)
    return np.bincount(found, minlength=order.samples)


def _faults(lines: Sequence[Line], held: Sequence[int | None], order: Order, steps: int) -> Iterator[str]:
    """What is wrong, in the order of the lines."""
    all_steps = {line.step for line in lines}
    seen: set[int] = set()
    attempt = 1
    for place, (line, step) in enumerate(zip(lines, held, strict=True), start=1):
        if line.step in seen:
            yield f"line {place}: a second line of step {line.step}"
        elif line.step != place and place not in all_steps:
            yield f"line {place}: the line of step {place} is missing, this one is of step {line.step}"
        elif line.step != place:
            yield f"line {place}: out of order, it is of step {line.step}"
        elif line.step > steps:
            yield f"line {place}: step {line.step} is beyond the last one, {steps}"
        elif wrong := _wrong(line, step, order, attempt):
            yield f"line {place}: {wrong}"
        seen.add(line.step)
        attempt = max(attempt, line.attempt)
    if len(lines) < steps:
        yield f"the line of step {len(lines) + 1} is missing, {steps} steps were made"


def _wrong(line: Line, held: int | None, order: Order, attempt: int) -> str:
    """What a line at its right place tells otherwise than the order of samples does."""
    planned = line.step - 1
    if held != planned:
        found = "samples that no step has" if held is None else f"the samples of step {held + 1}"
        return f"step {line.step} was made of {found}"
    if line.samples != order.size(planned):
        return f"step {line.step} has {order.size(planned)} samples, not {line.samples}"
    if line.epoch != order.epoch_of(planned):
        return f"step {line.step} belongs to epoch {order.epoch_of(planned)}, not {line.epoch}"
    if line.attempt < attempt:
        return f"attempt {line.attempt} after attempt {attempt}"
    return ""


_Told = tuple[Indices, Indices, Indices]  # steps, how many samples were fed in each, and all their numbers


class Ledger:
    """Every process notes what it feeds; the first one writes the lines, at a checkpoint of their steps.

    The lines are on the disk before the checkpoint has its name. A crash between the two leaves lines of steps that
    will be made again: they are dropped at the next start.
    """

    def __init__(self, directory: Path, group: Group, order: Order, resumed_step: int, attempt: int) -> None:
        self._path, self._group, self._order, self._attempt = directory / LEDGER_FILE, group, order, attempt
        self._speaks = group.rank.rank % group.model_size == 0  # of those that hold one copy of the model together
        self._fed: dict[int, list[Indices]] = {}
        self._due: list[Line] = []  # collected, and not on the disk yet
        self._writing = threading.Lock()  # a checkpoint and a snapshot may come to it at once
        if group.rank.first:
            _forget_after(self._path, resumed_step)

    def fed(self, step: int, indices: Indices) -> None:
        """One micro-batch of `step`, counted from 0, goes to the model."""
        if self._speaks:
            self._fed.setdefault(step, []).append(indices)

    def refused(self, step: int) -> None:
        """What this process fed in that step did not enter the weights: it will be fed again."""
        self._fed.pop(step, None)

    def collect(self, step: int) -> Callable[[], None] | None:
        """What the first process calls before the checkpoint of `step` counts; all take part.

        It may be called later and in another thread. When a checkpoint comes to nothing, the next one's call writes
        its lines too.
        """
        told = self._group.collect(_flat(self._fed))
        self._fed = {}
        if not self._group.rank.first:
            return None
        self._due += self._lines(told)
        return lambda: self._commit(step)

    def _lines(self, told: Sequence[_Told]) -> list[Line]:
        """Slices are in the order of ranks, which is the order of the batch."""
        batches: dict[int, list[Indices]] = {}
        for steps, counts, ids in told:
            for step, part in zip(steps.tolist(), np.split(ids, np.cumsum(counts))[:-1], strict=True):
                batches.setdefault(step, []).append(part)
        return [self._line(step, np.concatenate(batches[step])) for step in sorted(batches)]

    def _line(self, step: int, ids: Indices) -> Line:
        return Line(
            step=step + 1,
            epoch=self._order.epoch_of(step),
            samples=len(ids),
            digest=digest_of(ids),
            processes=self._group.size,
            attempt=self._attempt,
        )

    def _commit(self, step: int) -> None:
        reached("ledger")
        with self._writing:
            lines = [line for line in self._due if line.step <= step]
            try:
                with self._path.open("a") as file:
                    file.write("".join(f"{line.model_dump_json()}\n" for line in lines))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise unwritable(self._path, error) from error
            del self._due[: len(lines)]


def _flat(fed: dict[int, list[Indices]]) -> _Told:
    """Three rows of numbers, however many steps and micro-batches there were."""
    parts = [part for step in fed for part in fed[step]]
    counts = [sum(len(part) for part in fed[step]) for step in fed]
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return np.array(list(fed), np.int64), np.array(counts, np.int64), ids


def _forget_after(path: Path, step: int) -> None:
    """Keep the lines of the checkpoint that training goes on from; those of later steps will be made again."""
    kept = []
    for row in path.read_text().split("\n")[:-1] if path.exists() else []:
        try:
            if json.loads(row)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break  # nothing behind it can be relied on
        kept.append(f"{row}\n")
    if len(kept) < step:
        print(
            f"warning: {path.name} has {len(kept)} lines for the {step} steps of the checkpoint, so `pipe verify` "
            "will refuse this run; start anew with `pipe run train --force train` to have every sample proven",
            file=sys.stderr,
        )
    write_atomic(path, "".join(kept))
