"""What the candidate must not be worse than: the champion, else the task's own baseline, else nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from evaluate.champion import champion_predictor, open_champion
from pipeline.spec.data import Samples, bare, named
from pipeline.spec.errors import DataError
from pipeline.spec.registry import read_registry
from pipeline.spec.task import HasBaseline, Task

if TYPE_CHECKING:
    from pipeline.spec.task import Batch, Outputs, Predictor


@dataclass(frozen=True)
class Baseline:
    kind: Literal["champion", "task"]
    bundle: str | None  # digest of the champion's bundle
    predict: Predictor


def find_baseline(task: Task, samples: Samples, runs: Path, checkpoint: str, seed: int) -> Baseline | None:
    entry = read_registry(runs).champion_for(checkpoint)
    if entry is not None:
        bundle = open_champion(entry, runs)
        return Baseline("champion", bundle.digest, champion_predictor(bundle, task, samples))
    if isinstance(task, HasBaseline):
        return Baseline("task", None, _checked(task, _fit(task, seed)))
    return None


def _fit(source: HasBaseline, seed: int) -> Predictor:
    """Seeded, so that every process that fits one fits the same."""
    random.seed(seed)
    np.random.seed(seed)  # what a user's scikit-learn model draws from
    torch.manual_seed(seed)
    try:
        return source.baseline()
    except Exception as error:  # whatever the user's code and libraries may raise
        raise DataError(f"baseline(): {type(error).__name__}: {error}") from error


def _checked(task: Task, predict: Predictor) -> Predictor:
    def predictor(batch: Batch) -> Outputs:
        try:
            return bare(task, named(task, predict(batch)))
        except Exception as error:
            raise DataError(f"baseline(): its predictor failed: {type(error).__name__}: {error}") from error

    return predictor
