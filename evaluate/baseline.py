"""What the candidate must not be worse than: the champion, else the task's own baseline, else nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from evaluate.champion import champion_predictor
from evaluate.prediction import count_of
from pipeline.spec.bundle import Bundle
from pipeline.spec.champion import champion_bundle
from pipeline.spec.data import Samples, bare, named
from pipeline.spec.errors import DataError
from pipeline.spec.registry import Change, read_registry
from pipeline.spec.run import Run
from pipeline.spec.shelf import shelf_of
from pipeline.spec.task import HasBaseline, Task

if TYPE_CHECKING:
    from pipeline.spec.task import Batch, Outputs, Predictor


@dataclass(frozen=True)
class Baseline:
    kind: Literal["champion", "task"]
    bundle: str | None  # digest of the champion's bundle
    predict: Predictor
    origin: Mapping[str, str] | None = None  # of the champion: who named it, and where its bundle was


def find_baseline(task: Task, samples: Samples, run: Run, checkpoint: str) -> Baseline | None:
    word = run.config.registry
    registry = read_registry(run.runs, word)
    entry = registry.champion_for(checkpoint)
    if entry is not None:
        bundle = champion_bundle(entry, run.runs, word)
        origin = origin_of(registry.promoted(entry), bundle, run)
        return Baseline("champion", bundle.digest, champion_predictor(bundle, task, samples), origin)
    if isinstance(task, HasBaseline):
        return Baseline("task", None, _checked(task, _fit(task, run.config.evaluate.seed)))
    return None


def origin_of(change: Change, bundle: Bundle, run: Run) -> dict[str, str]:
    """For people who read the verdict later, when the registry says something else or is out of reach."""
    own = bundle.path == run.runs / change.entry.path
    copied = "" if own else shelf_of(run.config.registry, run.runs).where
    told = {"run": change.entry.run, "bundle": bundle.digest, "registry": copied}
    return {**told, "at": change.at, "by": change.by, "reason": change.reason}


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
            outputs = named(task, predict(batch))
        except Exception as error:
            raise DataError(f"baseline(): its predictor failed: {type(error).__name__}: {error}") from error
        for name, tensor in outputs.items():
            if not tensor.ndim or len(tensor) != count_of(batch):
                shape = tuple(tensor.shape)
                raise DataError(
                    f"baseline(): its predictor answered {name} of shape {shape} to {count_of(batch)} samples"
                )
        return bare(task, outputs)

    return predictor
