"""What a model of transformers can take of a task's texts: ids that its embedding has, at positions that it knows.

Beyond its positions a model answers all the same, and badly; beyond its embedding it fails in the middle of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipeline.spec.data import Samples
from pipeline.spec.errors import DataError
from pipeline.spec.task import Task
from pipeline.spec.tokenizer import NAME, ids_of
from train.pretrained.matching import core_of

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
    path = folder / NAME
    if core is None or not path.is_file():
        return
    if (highest := max(ids_of(path))) >= (rows := _rows(core)):
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
