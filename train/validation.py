"""Validation after each epoch, exact for any number of processes, and checks of the task before training.

Each sample counts once. Before training, texts must fit a model of transformers: ids within its embedding (beyond it a
kernel fails), positions that it has (beyond them it answers badly).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.contract.data import Samples
from pipeline.contract.task import Batch, HasLossWeight, HasSampleGroups, HasServing, Outputs, Task, transformers_model
from pipeline.system.errors import DataError
from pipeline.system.files import TOKENIZER_FILE, tokenizer_ids
from pipeline.system.processes import Rank
from train.batch_order import check_order_values
from train.optim import Precision
from train.parallel.base import Strategy
from train.process_group import ProcessGroup


@torch.no_grad()
def validate(
    task: Task,
    strategy: Strategy,
    samples: Samples,
    group: ProcessGroup,
    batch_size: int,
    cuts: Sequence[int] | None = None,
) -> dict[str, float]:
    """Return the mean loss and metrics over the whole split, equal on every process.

    Slices and batches begin and end at `cuts`: between groups; without them, between any samples.
    """
    cuts = cuts or range(len(samples) + 1)
    strategy.sync_weights()
    strategy.model.eval()
    sums = {
        number: _slice_sums(task, strategy, samples, group, _batches(cuts, parts, group, batch_size))
        for number, parts in strategy.slices(len(cuts) - 1).items()
    }
    strategy.model.train()
    totals = _add_slices(sums, group)
    weight = totals.pop(_WEIGHT)
    if not weight:
        raise DataError("loss_weight() is 0 for the whole validation split, so that it has no loss; check its labels")
    means = {name: total / (weight if name == "loss" else len(samples)) for name, total in totals.items()}
    if not math.isfinite(means["loss"]):
        raise DataError(f"the validation loss is {means['loss']}; lower train.lr or look for bad samples")
    if group.rank.first and (nonfinite := [name for name, mean in means.items() if not math.isfinite(mean)]):
        print(
            f"warning: {', '.join(nonfinite)} is not finite on the validation split; the gate will reject that",
            flush=True,
        )
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


_WEIGHT = ""  # the sum of the weights of the loss; no metric has this name


def _slice_sums(
    task: Task, strategy: Strategy, samples: Samples, group: ProcessGroup, batches: Iterable[range]
) -> dict[str, float]:
    """Return the sums over a slice of the split; empty where another process computes them."""
    sums: dict[str, float] = {}
    for chosen in batches:
        if not chosen and not strategy.collective_forward:
            continue
        group.heartbeat.beat()
        batch = {name: column.to(group.device) for name, column in samples.batch(chosen or range(1)).items()}
        outputs = strategy.predict(batch)
        if chosen and outputs is not None:
            for name, value in _batch_sums(task, strategy.objective.precision, outputs, batch, len(chosen)).items():
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _batches(cuts: Sequence[int], parts: range, group: ProcessGroup, size: int) -> list[range]:
    """Return batches of a slice; as many on every process, the last ones empty where a slice is smaller."""
    batches = group_batches(cuts, parts, size)
    copies = (Rank(copy, world_size=group.data_size).slice_of(len(cuts) - 1) for copy in range(group.data_size))
    return batches + [range(0)] * (max(len(group_batches(cuts, copy, size)) for copy in copies) - len(batches))


def group_batches(cuts: Sequence[int], parts: range, size: int) -> list[range]:
    """Return batches of consecutive whole groups with at most `size` samples, or a single group."""
    batches = []
    start = parts.start
    while start < parts.stop:
        stop = max(start + 1, bisect.bisect_right(cuts, cuts[start] + size, start, parts.stop + 1) - 1)
        batches.append(range(cuts[start], cuts[stop]))
        start = stop
    return batches


def whole_groups(task: Task, samples: Samples) -> tuple[Samples, Sequence[int]]:
    """Return the split with the samples of each group side by side, and the positions where it may be cut."""
    if not isinstance(task, HasSampleGroups) or samples.is_stream:
        return samples, range(len(samples) + 1)
    groups = check_order_values("groups", task.sample_groups(samples.source), len(samples))
    order = np.argsort(groups, kind="stable")
    borders = np.flatnonzero(np.diff(groups[order])) + 1
    return samples.rearranged(order.tolist()), [0, *borders.tolist(), len(groups)]


def _batch_sums(task: Task, precision: Precision, outputs: Outputs, batch: Batch, count: int) -> dict[str, float]:
    weight = float(loss_weight(task, batch)) if isinstance(task, HasLossWeight) else count
    with precision.autocast():
        sums = {"loss": float(task.loss(outputs, batch)) * weight, _WEIGHT: weight}
    metrics = {} if isinstance(task, HasServing) else task.metrics(outputs, batch)  # of what is served
    for name, values in metrics.items():
        if values.shape != (count,):
            raise DataError(f"metrics(): {name} must have one value per sample, but has shape {tuple(values.shape)}")
        sums[name] = float(values.double().sum())
    return sums


def _add_slices(sums: dict[int, dict[str, float]], group: ProcessGroup) -> dict[str, float]:
    """Add up all slices in their order, so that the bits do not depend on which process has which slice."""
    slices = [item for by_number in group.gather(sums) for item in by_number.items() if item[1]]
    totals: dict[str, float] = {}
    for _, slice_sums in sorted(slices, key=lambda item: item[0]):
        for name, value in slice_sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def loss_weight(task: HasLossWeight, batch: Batch) -> Tensor:
    return torch.as_tensor(task.loss_weight(batch), dtype=torch.float64)


def check_loss_weight(task: Task, samples: Samples) -> None:
    """Check with two samples that the weight of the loss is one number that can be one."""
    if not isinstance(task, HasLossWeight):
        return
    weight = loss_weight(task, samples.batch(samples.ends))
    if weight.ndim or not 0 <= weight.item() < math.inf:
        raise DataError(f"loss_weight(): must return one finite number for a batch, not below 0; returned {weight}")


IDS, POSITIONS = "input_ids", "position_ids"  # columns, as transformers name them


def check_texts(task: Task, model: nn.Module, splits: Iterable[Samples]) -> None:
    """Check that texts fit a model of transformers: a whole split in memory, else its first sample."""
    core: Any = (located := transformers_model(model)) and located[1]
    if core is None or IDS not in task.inputs:
        return
    rows, max_positions = _rows(core), getattr(core.config, "max_position_embeddings", None)
    for samples in splits:
        columns = samples.columns or samples.batch([0])
        ids = columns[IDS]
        if (lowest := int(ids.min())) < 0 or (highest := int(ids.max())) >= rows:
            raise DataError(
                f"data({samples.split!r}): column `{IDS}` has the id {lowest if lowest < 0 else highest}, but the "
                f"model's embedding has {rows} rows (vocab_size of its config.json): the tokenizer is another model's"
            )
        if isinstance(max_positions, int) and (last := _last_position(task, columns)) >= max_positions:
            raise DataError(
                f"data({samples.split!r}): a text has {last + 1} positions, but the model has {max_positions} "
                "(max_position_embeddings of its config.json); to fix it, cut texts to that length"
            )


def check_tokenizer(folder: Path, model: nn.Module) -> None:
    """Check that the tokenizer.json in a folder fits the model; pretrained models come with one."""
    core: Any = (located := transformers_model(model)) and located[1]
    path = folder / TOKENIZER_FILE
    if core is None or not path.is_file():
        return
    if (highest := max(tokenizer_ids(path))) >= (rows := _rows(core)):
        raise DataError(
            f"{path}: its highest id is {highest}, but the model's embedding has {rows} rows (vocab_size of "
            f"{folder / 'config.json'}); both must come from one model, or adapt() must call resize_token_embeddings"
        )


def _rows(core: Any) -> float:
    try:
        return int(core.get_input_embeddings().weight.shape[0])
    except NotImplementedError:  # as CANINE, which takes any character
        return math.inf


def _last_position(task: Task, columns: Any) -> int:
    if POSITIONS in task.inputs:
        positions: Tensor = columns[POSITIONS]
        return int(positions.max())
    return int(columns[IDS].shape[1]) - 1
