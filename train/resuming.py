"""Where training goes on: at the newest checkpoint that is whole, or at a snapshot in memory that is newer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.spec.errors import BundleError, StageError
from train.checkpoint import CheckpointStore, Progress, Saved
from train.group import Group
from train.proof import FILE, read_lines
from train.snapshot import Mirrors, newest_snapshot
from train.trainer import Trainer


class Found(NamedTuple):
    """What there is to go on from; nothing where training begins."""

    saved: Saved | None
    what: str


def find(
    store: CheckpointStore, mirrors: Mirrors | None, directory: Path, identity: Mapping[str, Any], group: Group
) -> Found:
    """All take part and find the same. It is known before a model is made: one that goes on needs no weights."""
    saved = store.newest()
    step = saved.progress.step if saved else 0
    if mirrors is not None:
        snapshot = newest_snapshot(
            mirrors, identity, group, lambda found: found.step > step and _stands(found, store, directory)
        )
        if snapshot is not None:
            return Found(snapshot, "snapshot")
    return Found(saved, "checkpoint")


def resume(trainer: Trainer, found: Found, group: Group) -> Progress:
    """All take part and go on from the same step."""
    progress = Progress() if found.saved is None else found.saved.progress
    if found.saved is not None:
        trainer.restore(found.saved)
        if group.rank.first:
            print(f"resumed from the {found.what} of step {progress.step} of {trainer.total_steps}", flush=True)
    if trainer.mirrors is not None:
        trainer.mirrors.begin(group.share(secrets.token_hex(4)), progress.step)
    return progress


def _stands(progress: Progress, store: CheckpointStore, directory: Path) -> bool:
    """What a snapshot relies on is on the disk: the lines of its steps, and the best checkpoint so far."""
    try:
        lines = read_lines(directory / FILE, growing=True)
        if progress.best_step:
            store.load(progress.best_step)
    except (BundleError, StageError):
        return False
    return bool(lines) and lines[-1].step >= progress.step
