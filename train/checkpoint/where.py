"""Where a run's checkpoints are, by `train.checkpoints`."""

from __future__ import annotations

from pathlib import Path

from train.checkpoint.bucket import Bucket
from train.checkpoint.folder import Folder
from train.checkpoint.place import Place

_LOCAL = "file://"  # a folder as any other: it is synced and renamed


def place_of(word: str, directory: Path, run: str) -> Place:
    """In the run's own `directory`, or elsewhere, where each run has a folder of its own."""
    if not word:
        return Folder(directory / "checkpoints")
    if "://" in word and not word.startswith(_LOCAL):
        return Bucket(f"{word.rstrip('/')}/{run}")
    return Folder(Path(word.removeprefix(_LOCAL)).expanduser() / run)
