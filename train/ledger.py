"""The ledger: which samples every committed step was made of, as they were really handed to the model."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pipeline.spec.files import unwritable, write_atomic
from train.group import Group
from train.order import Indices, Order
from train.peril import reached
from train.proof import FILE, Line, digest_of

_Told = tuple[Indices, Indices, Indices]  # steps, how many samples were fed in each, and all their numbers


class Ledger:
    """Every process notes what it feeds; the first one writes the lines, at a checkpoint of their steps.

    The lines are on the disk before the checkpoint has its name. A crash between the two leaves lines of steps that
    will be made again: they are dropped at the next start.
    """

    def __init__(self, directory: Path, group: Group, order: Order, resumed_step: int, attempt: int) -> None:
        self._path, self._group, self._order, self._attempt = directory / FILE, group, order, attempt
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
