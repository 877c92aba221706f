"""Exact validation: every sample of the split counted once, whatever the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from pipeline.spec.data import Samples
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.task import Task
from train.group import Group
from train.precision import Precision
from train.strategy import Alone

if TYPE_CHECKING:
    from pipeline.spec.task import Batch, Outputs


@torch.no_grad()
def validate(task: Task, strategy: Alone, samples: Samples, group: Group, batch_size: int) -> dict[str, float]:
    """Mean loss and metrics over the whole split, equal on every process."""
    strategy.settle()
    strategy.model.eval()
    found = {
        number: _work_through(task, strategy, samples, group, batch_size, mine)
        for number, mine in strategy.slices(len(samples)).items()
    }
    strategy.model.train()
    means = {name: total / len(samples) for name, total in _add_up(found, group).items()}
    if not math.isfinite(means["loss"]):
        raise DataError(f"the validation loss is {means['loss']}; lower train.lr or look for bad samples")
    if group.rank.first and (odd := [name for name, mean in means.items() if not math.isfinite(mean)]):
        print(f"warning: {', '.join(odd)} is not finite on the validation split; the gate will refuse that", flush=True)
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _work_through(
    task: Task, strategy: Alone, samples: Samples, group: Group, batch_size: int, mine: range
) -> dict[str, float]:
    """Sums over a slice of the split; none where another process answers for it."""
    sums: dict[str, float] = {}
    for chosen in rounds(mine, -(-len(samples) // group.data_size), batch_size):
        if not chosen and not strategy.together:
            continue
        group.watch.again()
        batch = {name: column.to(group.device) for name, column in samples.batch(chosen or range(1)).items()}
        outputs = strategy.predict(batch)
        if chosen and outputs is not None:
            for name, value in _sums(task, strategy.objective.precision, outputs, batch, len(chosen)).items():
                sums[name] = sums.get(name, 0.0) + value
    return sums


def rounds(mine: range, most: int, size: int) -> Iterator[range]:
    """Batches of this process's share; as many on every process, the last ones empty where a share is smaller."""
    for start in range(0, most, size):
        yield mine[start : start + size]


def _sums(task: Task, precision: Precision, outputs: Outputs, batch: Batch, count: int) -> dict[str, float]:
    with precision.autocast():
        sums = {"loss": float(task.loss(outputs, batch)) * count}
    for name, values in task.metrics(outputs, batch).items():
        if values.shape != (count,):
            raise DataError(f"metrics(): {name} must have one value per sample, found shape {tuple(values.shape)}")
        sums[name] = float(values.double().sum())
    return sums


def _add_up(found: dict[int, dict[str, float]], group: Group) -> dict[str, float]:
    """Over all slices, in their order: with other processes that hold the same slices the bits are the same."""
    slices = [(number, sums) for one in group.gather(found) for number, sums in one.items() if sums]
    totals: dict[str, float] = {}
    for _, sums in sorted(slices, key=lambda slice_: slice_[0]):
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


@torch.no_grad()
def check_metrics(task: Task, strategy: Alone, samples: Samples, group: Group, wanted: Iterable[str]) -> None:
    """The gate's metrics exist: learned from two samples now, not from a verdict after hours of training."""
    batch = {name: column.to(group.device) for name, column in samples.batch([0, len(samples) - 1]).items()}
    strategy.model.eval()
    outputs = strategy.predict(batch)
    strategy.model.train()
    known = task.metrics(outputs, batch) if outputs is not None else None
    if known is not None and (unknown := sorted(set(wanted) - set(known))):
        raise ConfigError(
            f"the gate wants the metric {unknown[0]}, the task has {', '.join(known)}; "
            "set evaluate.metric and evaluate.require to names from metrics()"
        )
