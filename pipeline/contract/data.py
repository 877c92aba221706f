"""Batches of a split, digests of its samples, and sequence packing.

`Samples` gives any set of sample indices as one batch of tensors. Packing puts several texts into rows of equal length,
so that little of the computation is padding; `mask_between_texts` keeps the attention of a transformers model within
each text.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from pipeline.contract.errors import ConfigError, DataError
from pipeline.contract.files import digest_bytes

if TYPE_CHECKING:
    from torch import nn

    from pipeline.contract.task import Outputs, Split, Task


class Samples:
    """One split of a task."""

    def __init__(self, split: str, source: Split) -> None:
        self.split = split
        self._items: Any = source
        self._columns = _as_columns(split, source) if isinstance(source, Mapping) else None
        measured: Any = next(iter(self._columns.values())) if self._columns else source
        try:
            self._count = len(measured)
        except TypeError as error:
            raise DataError(
                f"data({split!r}): must return columns of equal length, or a map-style data set with a length; "
                f"found {type(source).__name__}"
            ) from error
        if self._count == 0:
            raise DataError(f"data({split!r}): the split is empty")

    @property
    def in_memory(self) -> bool:
        return self._columns is not None

    @property
    def columns(self) -> Mapping[str, Tensor] | None:
        """The whole split, if it is in memory."""
        return self._columns

    def __len__(self) -> int:
        return self._count

    def first(self, count: int) -> Samples:
        """Return the first `count` samples; 0: all."""
        if not 0 < count < len(self):
            return self
        if self._columns is not None:
            return Samples(self.split, {name: column[:count] for name, column in self._columns.items()})
        return Samples(self.split, Subset(self._items, range(count)))

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """Return the samples at these indices, in this order, as one batch."""
        if self._columns is not None:
            index = torch.as_tensor(indices)
            return {name: column[index] for name, column in self._columns.items()}
        batch = default_collate([self._items[int(i)] for i in indices])
        if not isinstance(batch, dict):
            raise DataError(f"data({self.split!r}): an item must be a mapping of column names to values")
        for name, column in batch.items():
            if not isinstance(column, Tensor):
                raise DataError(f"data({self.split!r}): column `{name}` must hold numbers or tensors")
        return batch

    def batches(self, indices: range, size: int) -> Iterator[dict[str, Tensor]]:
        """Yield consecutive samples in batches of `size`; the last one may be smaller."""
        for start in range(indices.start, indices.stop, size):
            yield self.batch(range(start, min(start + size, indices.stop)))


def open_split(task: Task, split: str) -> Samples:
    return Samples(split, task.data(split))


def check_columns(task: Task, samples: Samples) -> None:
    """Check that the declared inputs are columns of the data."""
    columns = samples.batch([0])
    if missing := [name for name in task.inputs if name not in columns]:
        raise DataError(
            f"data({samples.split!r}): no column {', '.join(missing)}, which the task names as an input "
            f"(columns: {', '.join(columns)})"
        )


def forward(model: Any, task: Task, batch: Mapping[str, Tensor]) -> Outputs:
    """Call the model on its declared inputs and return the outputs as loss() and metrics() receive them."""
    return as_task_outputs(task, name_outputs(task, model(*[batch[name] for name in task.inputs])))


def name_outputs(task: Task, returned: Any) -> dict[str, Tensor]:
    """Return a model's outputs as a mapping by the declared names."""
    names = list(task.outputs)
    if isinstance(returned, Tensor):
        returned = (returned,)
    if isinstance(returned, Mapping):
        returned = [returned.get(name) for name in names]
    values = list(returned) if isinstance(returned, list | tuple) else []
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not len(values) == len(tensors) == len(names):
        raise DataError(f"the model must return the tensors named in `outputs` ({', '.join(names)})")
    return dict(zip(names, tensors, strict=True))


def as_task_outputs(task: Task, outputs: Mapping[str, Tensor]) -> Outputs:
    """Return what loss() and metrics() receive: the tensor itself if the task declares a single output."""
    return outputs[task.outputs[0]] if len(task.outputs) == 1 else outputs


def _as_columns(split: str, source: Mapping[str, Any]) -> dict[str, Tensor]:
    columns = {name: _as_column(split, name, value) for name, value in source.items()}
    if not columns:
        raise DataError(f"data({split!r}): has no columns")
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        sizes = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"data({split!r}): columns differ in length ({sizes})")
    return columns


def _as_column(split: str, name: str, value: Any) -> Tensor:
    try:
        column = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data({split!r}): column `{name}` is not an array of numbers: {error}") from error
    if column.ndim == 0:
        raise DataError(f"data({split!r}): column `{name}` is a single number, not one value per sample")
    return column


_BATCH = 512

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Fingerprint:
    """The digest of a split: of every column of every sample in order, independent of the batch size."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for row in _rows(batch, sorted(batch), prefixed=False):
            data = digest_bytes(row).encode()
            self._digest.update(len(data).to_bytes(8, "big") + data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint(samples: Samples) -> str:
    digest = Fingerprint()
    for batch in samples.batches(range(len(samples)), _BATCH):
        digest.add(batch)
    return digest.hexdigest()


def sample_digests(samples: Samples, columns: Sequence[str]) -> list[str]:
    """Return one digest per sample over the named columns; equal digests are exact duplicates."""
    digests = []
    for batch in samples.batches(range(len(samples)), _BATCH):
        digests += [digest_bytes(row) for row in _rows(batch, sorted(columns), prefixed=True)]
    return digests


def batch_digests(batch: Mapping[str, Tensor], columns: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bytes_]]:
    """Return the first 16 bytes of each sample's digest, so that those of millions fit in memory."""
    rows = _rows(batch, sorted(columns), prefixed=True)
    return np.frombuffer(b"".join(hashlib.sha256(row).digest()[:16] for row in rows), dtype="S16")


def _rows(batch: Mapping[str, Tensor], names: Sequence[str], prefixed: bool) -> Iterator[bytes]:
    """Yield the bytes to hash of each sample, built for a whole batch at once: a torch call per value takes minutes."""
    parts = [part for name in names for part in _encode(name, batch[name], prefixed)]
    count = len(batch[names[0]])
    rows = np.concatenate([np.broadcast_to(part, (count, part.shape[-1])) for part in parts], axis=1)
    width, data = rows.shape[1], rows.tobytes()
    return (data[start : start + width] for start in range(0, count * width, width))


def _encode(name: str, column: Tensor, prefixed: bool) -> Iterator[Bytes]:
    value = column.detach().cpu().contiguous()
    shape = tuple(value.shape[1:])
    raw = value.reshape(-1).view(torch.uint8).reshape(len(value), math.prod(shape) * value.itemsize).numpy()
    for part in (f"{name}:{value.dtype}:{shape}:".encode(), raw):
        length = len(part) if isinstance(part, bytes) else part.shape[1]
        if prefixed:
            yield np.frombuffer(length.to_bytes(8, "big"), np.uint8)
        yield np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part


Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class PackedRows:
    """Packed texts: `segments` numbers those of a row from 1, 0 is padding on the left; positions restart in each."""

    ids: Integers
    segments: Integers
    positions: Integers

    @property
    def padding(self) -> float:
        """The fraction of positions that are padding."""
        return float((self.segments == 0).mean())


def cut_texts(texts: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Split texts that are longer than a row; drop parts of a single token, which have nothing to predict."""
    pieces = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    return [piece for piece in pieces if len(piece) > 1]


def pack_texts(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """Pack texts into rows by first fit: each text goes into the first row with enough room."""
    rows: list[list[Sequence[int]]] = []
    free: list[int] = []
    first_row_with = [0] * (length + 1)  # lower bound of the first row with this much room
    for text in texts:
        text_length = min(len(text), length)  # a longer text is rejected by _fill
        row_index = next(
            (i for i in range(first_row_with[text_length], len(rows)) if free[i] >= text_length), len(rows)
        )
        if row_index == len(rows):
            rows.append([])
            free.append(length)
        rows[row_index].append(text)
        free[row_index] -= text_length
        for size in range(text_length, length + 1):  # no earlier row has that much room
            first_row_with[size] = max(first_row_with[size], row_index)
    return _fill(rows, length, pad)


def one_text_per_row(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """Put each text into a row without packing, as requests arrive; for evaluation."""
    return _fill([[text] for text in texts], length, pad)


def _fill(rows: Sequence[Sequence[Sequence[int]]], length: int, pad: int) -> PackedRows:
    longest = max((sum(map(len, row)) for row in rows), default=0)
    if longest > length:
        raise DataError(f"a text of {longest} tokens is longer than a row of {length}; call cut_texts() first")
    ids = np.full((len(rows), length), pad, np.int64)
    segments, positions = np.zeros_like(ids), np.zeros_like(ids)
    for index, row in enumerate(rows):
        start = length - sum(map(len, row))
        for number, text in enumerate(row, start=1):
            columns = slice(start, start := start + len(text))
            ids[index, columns] = text
            segments[index, columns] = number
            positions[index, columns] = np.arange(len(text))
    return PackedRows(ids, segments, positions)


# Attention for which transformers builds masks from positions in every row; flash attention does so for one row.
_SUPPORTED_ATTENTION = ("sdpa", "eager", "flex_attention")


def mask_between_texts(model: nn.Module) -> nn.Module:
    """Limit the attention of a transformers model to each token's text: a text begins where `position_ids` restart.

    The attention mask of a batch is ignored: padding on the left, at position 0, is not visible to any text. Passes
    that continue with a cache are unchanged. The model's class and the names of its weights stay the same.
    """
    names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(functools.partial(_separate_texts, names), with_kwargs=True)
    return model


def _separate_texts(
    names: Sequence[str], model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = dict(zip(names, arguments, strict=False)) | keywords
    mask = inputs.get("attention_mask")
    if inputs.get("past_key_values") is None and (mask is None or mask.ndim == 2):
        _check(model, inputs)
        # With a mask or a cache, transformers treats a row as one text, whatever its positions are.
        inputs |= {"attention_mask": None, "use_cache": False}
    return (), inputs


def _check(model: nn.Module, inputs: dict[str, Any]) -> None:
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in _SUPPORTED_ATTENTION:
        raise ConfigError(
            f"attention by {attention!r} does not keep the texts of a row apart; "
            f"build the model with attn_implementation={_SUPPORTED_ATTENTION[0]!r}"
        )
    if inputs.get("position_ids") is None:
        raise DataError("the model gets no position_ids, which mark where each text of a row begins; pass them")
