"""Exact validation: every sample of the split counted once, whatever the number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from pipeline.spec.data import Samples, forward
from pipeline.spec.errors import ConfigError, DataError
from pipeline.spec.task import Task
from train.group import Group
from train.precision import Precision


@torch.no_grad()
def validate(
    task: Task, model: nn.Module, samples: Samples, group: Group, precision: Precision, batch_size: int
) -> dict[str, float]:
    """Mean loss and metrics over the whole split, equal on every process."""
    group.sync_buffers(model)
    model.eval()
    sums: dict[str, float] = {"loss": 0.0}
    for columns in samples.batches(group.rank.slice_of(len(samples)), batch_size):
        batch = {name: column.to(group.device) for name, column in columns.items()}
        with precision.autocast():
            outputs = forward(model, task, batch)
            loss = task.loss(outputs, batch)
        count = len(next(iter(batch.values())))
        sums["loss"] += float(loss) * count
        for name, values in task.metrics(outputs, batch).items():
            if values.shape != (count,):
                raise DataError(f"metrics(): {name} must have one value per sample, found shape {tuple(values.shape)}")
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
    model.train()
    totals = group.total(list(sums.values()))
    means = {name: total / len(samples) for name, total in zip(sums, totals, strict=True)}
    if not math.isfinite(means["loss"]):
        raise DataError(f"the validation loss is {means['loss']}; lower train.lr or look for bad samples")
    if group.rank.first and (odd := [name for name, mean in means.items() if not math.isfinite(mean)]):
        print(f"warning: {', '.join(odd)} is not finite on the validation split; the gate will refuse that", flush=True)
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


@torch.no_grad()
def check_metrics(task: Task, model: nn.Module, samples: Samples, device: torch.device, wanted: Iterable[str]) -> None:
    """The gate's metrics exist: learned from two samples now, not from a verdict after hours of training."""
    batch = {name: column.to(device) for name, column in samples.batch([0, len(samples) - 1]).items()}
    model.eval()
    known = task.metrics(forward(model, task, batch), batch)
    model.train()
    if unknown := sorted(set(wanted) - set(known)):
        raise ConfigError(
            f"the gate wants the metric {unknown[0]}, the task has {', '.join(known)}; "
            "set evaluate.metric and evaluate.require to names from metrics()"
        )
