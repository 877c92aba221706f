"""Exact validation: every sample of the split counted once, whatever the number of processes.

What a model of transformers can take of a task's texts: ids that its embedding has, at positions that it knows.

Beyond its positions a model answers all the same, and badly; beyond its embedding it fails in the middle of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.contract.data import Samples
from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.files import TOKENIZER_FILE, tokenizer_ids
from pipeline.contract.task import Task
from train.optim import Precision
from train.parallel.base import Strategy
from train.pretrained.matching import core_of
from train.process_group import Group

if TYPE_CHECKING:
    from pipeline.contract.task import Batch, Outputs


@torch.no_grad()
def validate(task: Task, strategy: Strategy, samples: Samples, group: Group, batch_size: int) -> dict[str, float]:
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
    task: Task, strategy: Strategy, samples: Samples, group: Group, batch_size: int, mine: range
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
def check_metrics(task: Task, strategy: Strategy, samples: Samples, group: Group, wanted: Iterable[str]) -> None:
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


IDS, POSITIONS = "input_ids", "position_ids"  # columns, as transformers name them


def check_texts(task: Task, model: nn.Module, splits: Iterable[Samples]) -> None:
    """All of a split where it is in memory, else its first sample. Other models are left alone."""
    core: Any = (found := core_of(model)) and found[1]
    if core is None or IDS not in task.inputs:
        return
    rows, most = _rows(core), getattr(core.config, "max_position_embeddings", None)
    for samples in splits:
        columns = samples.columns or samples.batch([0])
        ids = columns[IDS]
        if (lowest := int(ids.min())) < 0 or (highest := int(ids.max())) >= rows:
            raise DataError(
                f"data({samples.split!r}): column `{IDS}` holds the id {lowest if lowest < 0 else highest}, but the "
                f"model's embedding has {rows} rows (vocab_size of its config.json): the tokenizer is another model's"
            )
        if isinstance(most, int) and (last := _last_position(task, columns)) >= most:
            raise DataError(
                f"data({samples.split!r}): a text has {last + 1} positions, but the model knows {most} "
                "(max_position_embeddings of its config.json); cut texts to that length"
            )


def check_tokenizer(folder: Path, model: nn.Module) -> None:
    """Of a folder with a tokenizer.json, as pretrained models bring it."""
    core: Any = (found := core_of(model)) and found[1]
    path = folder / TOKENIZER_FILE
    if core is None or not path.is_file():
        return
    if (highest := max(tokenizer_ids(path))) >= (rows := _rows(core)):
        raise DataError(
            f"{path}: its highest id is {highest}, but the model's embedding has {rows} rows (vocab_size of "
            f"{folder / 'config.json'}); both must come from one model, or adapt() must call resize_token_embeddings"
        )


def _rows(core: Any) -> int:
    return int(core.get_input_embeddings().weight.shape[0])


def _last_position(task: Task, columns: Any) -> int:
    if POSITIONS in task.inputs:
        positions: Tensor = columns[POSITIONS]
        return int(positions.max())
    return int(columns[IDS].shape[1]) - 1
