"""Why no file can be a model: torch's own answers are no numbers, change by themselves, or hang on who asks beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from export.parity import Arrays, named_arrays
from pipeline.spec.data import Samples, forward
from pipeline.spec.exporting import Export
from pipeline.spec.task import Task

Array = np.ndarray[Any, Any]

_FEW = 4  # samples that are asked twice, and one by one
_BATCH = 64


def by_chance(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Nothing where the same samples are answered by the same numbers, together or alone."""
    first = _answers(task, model, test, range(min(_FEW, len(test))))
    again = _answers(task, model, test, range(min(_FEW, len(test))))
    if moved := _named(name for name in first if not np.array_equal(first[name], again[name], equal_nan=True)):
        return (
            f"torch answers {moved} differently each time it is asked the same; look for functional dropout without "
            "training=self.training, or noise in a router"
        )
    return _no_number(task, model, test) or _company(task, model, test, config, first)


def _no_number(task: Task, model: nn.Module, test: Samples) -> str:
    for start in range(0, len(test), _BATCH):
        found = _answers(task, model, test, range(start, min(start + _BATCH, len(test))))
        for name, answer in found.items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1)).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself answers `{name}` of test sample {sample} with NaN, and nothing equals that; look "
                    "for a division by zero, or a root or logarithm of what is not positive"
                )
    return ""


def _company(task: Task, model: nn.Module, test: Samples, config: Export, together: Arrays) -> str:
    alone = [_answers(task, model, test, range(row, row + 1)) for row in range(min(_FEW, len(test)))]
    moved = [name for name, answer in together.items() if not _alike([one[name] for one in alone], answer, config)]
    if not moved:
        return ""
    return (
        f"torch answers {_named(moved)} of a sample otherwise when others are beside it in the batch, and a service "
        "puts strangers' requests into one; compute nothing along the first axis, and no python number (as by .item()) "
        "from the whole batch"
    )


def _alike(alone: Sequence[Array], together: Array, config: Export) -> bool:
    return all(one.shape == (1, *together.shape[1:]) for one in alone) and bool(
        np.allclose(np.concatenate(alone), together, rtol=config.rtol, atol=config.atol)
    )


@torch.no_grad()
def _answers(task: Task, model: nn.Module, test: Samples, rows: range) -> Arrays:
    return named_arrays(task, forward(model, task, test.batch(rows)))


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
