"""Find why torch's own outputs cannot be compared with a file: NaN, other values at every call or in other batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from export.checks.cases import evaluated_outputs, to_feed
from export.compare import Array, Arrays, rows_with
from export.conversion.trace import find_operator
from export.tolerance import allowed_error, is_within
from pipeline.contract.data import Samples
from pipeline.contract.settings.stages import Export
from pipeline.contract.task import Task

_REPEATED_SAMPLES = 4  # samples that are run twice, and one by one
_BATCH = 64
_RANDOM, _ITEM = torch.Tag.nondeterministic_seeded, torch.ops.aten._local_scalar_dense.default


def find_nondeterminism(task: Task, model: nn.Module, test: Samples, config: Export) -> str:
    """Return why torch's outputs are not reproducible, or nothing if the same samples give the same numbers."""
    first, second = (_outputs(task, model, test, range(min(_REPEATED_SAMPLES, len(test)))) for _ in range(2))
    if changed := _quote_names(name for name in first if not np.array_equal(first[name], second[name], equal_nan=True)):
        return (
            f"torch returns different values of {changed} for the same input{_find(task, model, test, _RANDOM)}; "
            "look for functional dropout without training=self.training, noise in a router, or Python's `random`"
        )
    return _nan_outputs(task, model, test) or _depends_on_batch(task, model, test, config, first)


def _nan_outputs(task: Task, model: nn.Module, test: Samples) -> str:
    """Return where torch returns NaN for a sample without missing numbers; empty if nowhere."""
    for start in range(0, len(test), _BATCH):
        batch = test.batch(range(start, min(start + _BATCH, len(test))))
        missing = rows_with(np.isnan, list(to_feed(task, batch).values()))
        for name, answer in evaluated_outputs(task, model, batch).items():
            if (broken := np.isnan(answer).reshape(len(answer), -1).any(axis=1) & ~missing).any():
                sample = start + int(broken.argmax())
                return (
                    f"torch itself returns NaN in `{name}` for test sample {sample}, so no file can equal it; look "
                    "for a division by zero, or a root or logarithm of a number that is not positive"
                )
    return ""


def _depends_on_batch(task: Task, model: nn.Module, test: Samples, config: Export, batched: Arrays) -> str:
    single = [_outputs(task, model, test, range(row, row + 1)) for row in range(min(_REPEATED_SAMPLES, len(test)))]
    parts = {name: [outputs[name] for outputs in single] for name in batched}
    changed = [name for name, answer in batched.items() if not _is_close(parts[name], answer, config)]
    if not changed:
        return ""
    return (
        f"torch's {_quote_names(changed)} for a sample depends on the other samples in the batch"
        f"{_find(task, model, test, _ITEM)}, and a service batches requests of different clients; compute nothing "
        "along the first axis, and no Python number (as by .item()) from the whole batch"
    )


def _find(task: Task, model: nn.Module, test: Samples, wanted: Any) -> str:
    batch = test.batch(range(min(_REPEATED_SAMPLES, len(test))))
    return find_operator(model, [batch[name] for name in task.inputs], wanted).rstrip()


def _is_close(single: Sequence[Array], batched: Array, config: Export) -> bool:
    if any(outputs.shape != (1, *batched.shape[1:]) for outputs in single):
        return False
    joined = np.concatenate(single)
    is_near = is_within(joined, batched, allowed_error(batched, config))
    return bool((is_near | (np.isnan(joined) & np.isnan(batched))).all())


def _outputs(task: Task, model: nn.Module, test: Samples, rows: range) -> Arrays:
    return evaluated_outputs(task, model, test.batch(rows))


def _quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
