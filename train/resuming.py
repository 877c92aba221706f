"""Where training goes on: at the newest checkpoint that is whole, or at a snapshot in memory that is newer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.spec.errors import BundleError, StageError
from train.checkpoint import CheckpointStore, Progress
from train.group import Group
from train.proof import FILE, read_lines
from train.snapshot import newest_snapshot
from train.trainer import Trainer


def resume(
    trainer: Trainer, store: CheckpointStore, directory: Path, identity: Mapping[str, Any], group: Group
) -> Progress:
    """All take part and go on from the same step."""
    saved, what, mirrors = store.newest(), "checkpoint", trainer.mirrors
    step = saved.progress.step if saved else 0
    if mirrors is not None:
        snapshot = newest_snapshot(
            mirrors, identity, group, lambda found: found.step > step and _stands(found, store, directory)
        )
        saved, what = (snapshot, "snapshot") if snapshot is not None else (saved, what)
    progress = Progress() if saved is None else saved.progress
    if saved is not None:
        trainer.restore(saved)
        if group.rank.first:
            print(f"resumed from the {what} of step {progress.step} of {trainer.total_steps}", flush=True)
    if mirrors is not None:
        mirrors.begin(group.share(secrets.token_hex(4)), progress.step)
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
