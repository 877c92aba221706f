"""Stores and states that are as small as can be."""

from __future__ import annotations

from pathlib import Path

import torch

from train.checkpoint.store import CheckpointStore
from train.state import Progress, State

IDENTITY = {"samples": 37, "batch_size": 8, "seed": 0}


def store(directory: Path, keep: int = 2, **identity: int) -> CheckpointStore:
    return CheckpointStore(directory, keep, {**IDENTITY, **identity})


def state(step: int, best: int = 0, fill: float = 0.0) -> State:
    progress = Progress(step=step, best_step=best, best_loss=0.1 if best else None)
    return State(progress, {"weights.it": torch.full((2, 2), fill)})


def save(directory: Path, step: int, best: int = 0, fill: float = 0.0, keep: int = 2) -> None:
    with store(directory, keep) as opened:
        opened.save(state(step, best, fill))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
