"""Snapshots: every process's part in the memory of its own machine and of another one, two of them in turn."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline.spec.errors import PipelineError, StageError
from train.checkpoint.background import Background
from train.checkpoint.manifest import Manifest, Written
from train.checkpoint.place import Deed
from train.checkpoint.share import Share, share_out
from train.group import Group
from train.snapshot.memory import Shelf, check_room
from train.snapshot.neighbours import Neighbours
from train.snapshot.parcel import swap
from train.state import State

KEPT = 2


class Mirrors:
    """A context around training, as the store of checkpoints is.

    A snapshot counts when one machine has its manifest; each machine writes that when all parts are where they belong.
    The place of the last but one is taken when all have the last: whoever dies, all parts of one of them are left.
    """

    def __init__(
        self, folder: Path, machine: str, identity: Mapping[str, Any], group: Group, timeout_seconds: int
    ) -> None:
        self.folder, self._identity, self._group = folder, dict(identity), group
        self.shelf, self.background = Shelf(folder), Background(group, timeout_seconds)
        self.neighbours = Neighbours(group.gather(machine), group.rank.rank)
        self.background.join()
        self._share: Share | None = None
        self._sizes: list[int] = []

    def begin(self, token: str, step: int) -> None:
        """Training goes on from `step`: what was made after it will be made again."""
        self.shelf.begin(token)
        if self.neighbours.leads:
            self.shelf.clean()
            self.shelf.forget_after(step)

    def save(self, state: State, before_commit: Deed | None) -> None:
        """All take part. Returns when the state is copied; the last one's failure is raised now, on all.

        `before_commit` is done by the first process when all parts are in place, before the snapshot counts.
        """
        self.background.wait()
        if self.background.any(self._share is None or not self._share.fits(state.tensors)):
            self._share_out(state)
        assert self._share is not None
        data = self._share.take(state.tensors)
        self.background.start(partial(self._write, state, data, before_commit or _nothing))

    def wait(self) -> None:
        """Until the last snapshot is complete."""
        self.background.wait()

    def remove(self) -> None:
        """Training is over: all take part."""
        self.background.wait()
        self._group.gather(None)
        if self.neighbours.leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _share_out(self, state: State) -> None:
        self._share = share_out(state.tensors, self.background.exchange)
        self._sizes = self._group.gather(self._share.bytes)
        here = self.neighbours.here
        kept = [rank for rank in range(self._group.size) if rank in here or self.neighbours.keeper(rank) in here]
        failure = _failure_of(lambda: check_room(self.folder, KEPT * sum(self._sizes[rank] for rank in kept)))
        for told in self._group.gather(failure):
            if told is not None:
                raise told

    def _write(self, state: State, data: memoryview, before_commit: Deed) -> None:
        """In the background, on every process."""
        step, rank = state.progress.step, self._group.rank.rank
        if self.neighbours.leads:
            self.shelf.forget_before(max(self.shelf.steps(), default=0))
        told: Written | PipelineError
        parts = swap(
            torch.frombuffer(data, dtype=torch.uint8),
            self.neighbours.keeper(rank),
            {ward: self._sizes[ward] for ward in self.neighbours.wards},
            self.background.exchange,
        )
        try:
            told = self.shelf.write(step, file_of(rank), data)
            for ward, part in parts.items():
                self.shelf.write(step, file_of(ward), part.numpy().data)
        except OSError as error:  # the others wait to be told
            told = StageError(f"cannot keep the snapshot of step {step} in {self.folder}: {error}")
        outcome = self.background.share(self._conclude(state, self.background.collect(told), before_commit))
        if isinstance(outcome, PipelineError):
            raise outcome
        if self.neighbours.leads:
            self.shelf.commit(step, outcome, _nothing)
        self.background.any(False)  # all have it

    def _conclude(self, state: State, told: list[Any], before: Deed) -> bytes | PipelineError:
        """The manifest, on the first process; or why there is none."""
        if not self._group.rank.first:
            return b""
        for one in told:
            if isinstance(one, PipelineError):
                return one
        failure = _failure_of(before)
        manifest = Manifest(state.progress, state.scaler, self._identity, self._group.size, tuple(told))
        return failure or manifest.encode()


def file_of(rank: int) -> str:
    return f"{rank}.safetensors"


def _nothing() -> None:
    """What is done before a snapshot that nobody else waits for."""


def _failure_of(work: Deed) -> PipelineError | None:
    try:
        work()
    except PipelineError as error:
        return error
    return None
