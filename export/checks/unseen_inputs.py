"""Inputs that the test set does not have: samples of other splits, values of whole ranges, every token id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.checks.cases import Batch, Inputs, make_cases
from export.compare import Attempts, Case
from export.conversion.padding import MASK
from export.conversion.trace import is_equal
from pipeline.contract.data import Samples, exceeded_limit, forward, is_stream, open_split
from pipeline.contract.task import Task

_SPLITS = ("train", "validation")
_BATCH, _SHORT_BATCH = 64, 8  # samples, and random ones of a slow model
_MAX_VALUES = 1 << 20  # of a random batch
_MAX_SAMPLES = 2048  # of a split; the budget of time may allow fewer
_MAX_STREAMED = 1024  # samples from the beginning of a stream
_WIDENED = 0.05  # of the range of a float, at both ends
_FEW_VALUES = 16  # distinct integers that are drawn from; beyond, any integer between the smallest and the largest
_RANDOM_BATCHES = 2
_MAX_COLUMNS = 512  # each drawn from a range of its own
_MIN_SECONDS = 0.5  # for all of this, however quick the test set was


@dataclass(frozen=True)
class Vocabulary:
    """Ids of an input, or of one of its columns, which an embedding of so many rows looks up."""

    name: str
    column: int | None
    size: int

    @property
    def text(self) -> str:
        return f"`{self.name}`" if self.column is None else f"column {self.column} of `{self.name}`"


@dataclass(frozen=True)
class UnseenInputs:
    """The inputs for a task's model that its test set lacks."""

    task: Task
    model: nn.Module
    test: Samples
    row_seconds: float = 0.0  # of a sample of the test set in ONNX Runtime

    def cases(self, seconds: float, attempts: Attempts) -> Iterator[Case]:
        """Yield at least one case of each kind, and as many as fit into its share of `seconds`."""
        share, pool = max(seconds, _MIN_SECONDS) / 4, [self.test.batch(_spread(len(self.test), _BATCH))]
        rows = max(_SHORT_BATCH, min(_BATCH, int(share / max(self.row_seconds, 1e-9))))
        for inputs in self._inputs(pool, attempts.left_out, rows):
            yield from make_cases(self.task, self.model, inputs, self.test, attempts, share)

    def _inputs(self, pool: list[dict[str, Tensor]], left_out: list[str], rows: int) -> Iterator[Inputs]:
        for split in _SPLITS:
            yield self._split_inputs(split, pool, left_out)
        yield self._random_inputs({name: [batch[name] for batch in pool] for name in self.task.inputs}, rows)
        for vocabulary in self.vocabularies:
            yield self._every_id(vocabulary)

    def _split_inputs(self, split: str, pool: list[dict[str, Tensor]], left_out: list[str]) -> Inputs:
        samples = _open_few(self.task, split)
        indices = _spread(len(samples), _MAX_SAMPLES)
        steps = max(1, len(indices) // _BATCH)
        for start in range(steps):  # so that each batch is spread over the whole split
            batch = samples.batch(indices[start::steps])
            if all(is_equal(batch[name], pool[0][name]) for name in self.task.inputs):
                continue  # as in projects without data, whose splits are one
            if limit := exceeded_limit(self.task, batch):
                left_out.append(f"{split} samples: {limit}")
                continue
            pool.append(batch)
            yield f"{split} samples", f"batch {len(indices[start::steps])} of {split} samples", batch

    def _random_inputs(self, pool: Mapping[str, list[Tensor]], rows: int) -> Inputs:
        size = sum(values[0].numel() for values in self.test.batch([0]).values())
        rows = max(1, min(rows, _MAX_VALUES // size))
        for seed in range(_RANDOM_BATCHES):
            batch = self.test.batch([index % len(self.test) for index in range(rows)])
            generator = np.random.default_rng(seed)
            names = [name for name in self.task.inputs if name != MASK]
            columns = {name: _draw(name, pool[name], batch[name], self.vocabularies, generator) for name in names}
            yield "random inputs of whole ranges", f"batch {rows} of random inputs", {**batch, **columns}

    def _every_id(self, vocabulary: Vocabulary) -> Inputs:
        """Yield batches that hold each id of a vocabulary once, with real values in the other inputs."""
        ids = np.random.default_rng(0).permutation(vocabulary.size)
        start = 0
        while start < len(ids):
            batch = self.test.batch([index % len(self.test) for index in range(_BATCH)])
            column = batch[vocabulary.name].clone()
            part = column if vocabulary.column is None else column[..., vocabulary.column]
            chosen = np.resize(ids[start : start + part.numel()], part.numel())
            part.copy_(torch.from_numpy(chosen).reshape(part.shape).to(part.dtype))
            start += part.numel()
            batch[vocabulary.name] = column
            if MASK in batch and vocabulary.name != MASK:
                batch[MASK] = torch.ones_like(batch[MASK])
            kind = f"every id of {vocabulary.text}"
            yield kind, f"ids up to {vocabulary.size - 1} of {vocabulary.text}", batch

    @cached_property
    def vocabularies(self) -> list[Vocabulary]:
        """Return the inputs that index embeddings, found by what the model's embeddings receive for real samples."""
        batch = self.test.batch(_spread(len(self.test), _BATCH))
        found: dict[tuple[str, int | None], int] = {}

        def note(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            for key in _places(self.task, batch, arguments[0] if arguments else None):
                size: Any = module.num_embeddings
                found[key] = min(found.get(key, size), size)

        embeddings = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        hooks = [module.register_forward_pre_hook(note) for module in embeddings]
        try:
            if embeddings:
                with torch.no_grad():
                    forward(self.model, self.task, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return [Vocabulary(*key, size) for key, size in found.items()]


def _places(task: Task, batch: Batch, ids: Any) -> Iterator[tuple[str, int | None]]:
    """Yield the inputs, or columns of inputs, that are the ids that an embedding got."""
    if not isinstance(ids, Tensor) or not ids.numel():
        return
    for name in task.inputs:
        values = batch[name]
        if values.dtype == torch.bool or bool((values != values.long()).any()):
            continue
        if values.shape == ids.shape and torch.equal(values.long(), ids.long()):
            yield name, None
        elif values.ndim > 1 and values[..., 0].numel() == ids.numel():
            for column in range(values.shape[-1]):
                if torch.equal(values[..., column].long().reshape(-1), ids.long().reshape(-1)):
                    yield name, column


def _spread(samples: int, count: int) -> list[int]:
    """Return evenly spaced indices."""
    count = min(samples, count)
    return [index * samples // count for index in range(count)]


def _open_few(task: Task, split: str) -> Samples:
    """Open a split; of a stream, only the beginning is read."""
    source: Any = task.data(split)
    if not is_stream(source):
        return open_split(task, split)
    items = [item() if callable(item) else item for item in islice(iter(source), _MAX_STREAMED)]
    return Samples(split, items, getattr(task, "collate", None))


def _draw(
    name: str, seen: list[Tensor], real: Tensor, vocabularies: list[Vocabulary], generator: np.random.Generator
) -> Tensor:
    """Return random values in the shape of `real`, of the range that was seen; ids of the whole vocabulary."""
    sizes = {vocabulary.column: vocabulary.size for vocabulary in vocabularies if vocabulary.name == name}
    is_mixed = any(column.shape[1:] != real.shape[1:] for column in seen)
    if real.ndim != 2 or None in sizes or is_mixed or real.shape[1] > _MAX_COLUMNS:
        values = np.concatenate([column.numpy().ravel() for column in seen])
        return torch.from_numpy(_draw_range(values, tuple(real.shape), sizes.get(None), generator)).to(real.dtype)
    columns = []
    for index in range(real.shape[1]):
        values = np.concatenate([column[:, index].numpy() for column in seen])
        columns.append(_draw_range(values, (len(real),), sizes.get(index), generator))
    return torch.from_numpy(np.stack(columns, axis=1)).to(real.dtype)


def _draw_range(
    values: np.ndarray[Any, Any], shape: tuple[int, ...], size: int | None, generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Draw from the vocabulary, from few distinct values, or from the range of the values."""
    if size is not None:
        return generator.integers(0, size, shape)
    known = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not known.size:
        return np.full(shape, values.flat[0])
    is_whole = known.dtype.kind != "f" or bool((known == np.round(known)).all())
    distinct = np.unique(known)
    if is_whole and (known.dtype.kind in "bf" or len(distinct) <= _FEW_VALUES):
        return generator.choice(distinct, shape)
    low, high = distinct[0], distinct[-1]
    if is_whole:
        return generator.integers(int(low), int(high), shape, endpoint=True)
    wide = float(high) - float(low)
    return generator.uniform(float(low) - _WIDENED * wide, float(high) + _WIDENED * wide, shape)
