"""A uniform view of a split: any set of sample indices as one batch of tensors.

Digests of data: of a whole split, and of each sample's model inputs.

Texts of unequal length in rows of equal length, several to a row, so that little of what is computed is padding.

Rows that hold several texts, for the causal language models of transformers as they stand: no text sees another.
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
        first: Any = next(iter(self._columns.values())) if self._columns else source
        try:
            self._count = len(first)
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
        """The whole split at once, where it is in memory."""
        return self._columns

    def __len__(self) -> int:
        return self._count

    def first(self, count: int) -> Samples:
        """Only the first so many; 0: all."""
        if not 0 < count < len(self):
            return self
        if self._columns is not None:
            return Samples(self.split, {name: column[:count] for name, column in self._columns.items()})
        return Samples(self.split, Subset(self._items, range(count)))

    def batch(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """The samples at these indices, in this order; columns are indexed at once, items collated."""
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
        """Consecutive samples in batches of `size`, the last one smaller."""
        for start in range(indices.start, indices.stop, size):
            yield self.batch(range(start, min(start + size, indices.stop)))


def open_split(task: Task, split: str) -> Samples:
    return Samples(split, task.data(split))


def check_columns(task: Task, samples: Samples) -> None:
    """The model's declared inputs are columns of the data."""
    found = samples.batch([0])
    if missing := [name for name in task.inputs if name not in found]:
        raise DataError(
            f"data({samples.split!r}): no column {', '.join(missing)}, which the task names as an input "
            f"(columns: {', '.join(found)})"
        )


def forward(model: Any, task: Task, batch: Mapping[str, Tensor]) -> Outputs:
    """Call the model on its declared inputs; see `named`."""
    return bare(task, named(task, model(*[batch[name] for name in task.inputs])))


def named(task: Task, returned: Any) -> dict[str, Tensor]:
    """What a model returned, as a mapping by the declared output names."""
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


def bare(task: Task, outputs: Mapping[str, Tensor]) -> Outputs:
    """What loss() and metrics() receive: the tensor itself when the task declares a single output."""
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
        raise DataError(f"data({split!r}): column `{name}` is no array of numbers: {error}") from error
    if column.ndim == 0:
        raise DataError(f"data({split!r}): column `{name}` is a single number, not one value per sample")
    return column


_BATCH = 512

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


class Fingerprint:
    """Digest of every column of every sample in order, whatever batches they come in: the identity of a split."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for row in _rows(batch, sorted(batch), prefixed=False):
            data = digest_bytes(row).encode()
            self._digest.update(len(data).to_bytes(8, "big") + data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def fingerprint(samples: Samples) -> str:
    found = Fingerprint()
    for batch in samples.batches(range(len(samples)), _BATCH):
        found.add(batch)
    return found.hexdigest()


def sample_digests(samples: Samples, columns: Sequence[str]) -> list[str]:
    """One digest per sample over the named columns; equal digests are exact duplicates."""
    found = []
    for batch in samples.batches(range(len(samples)), _BATCH):
        found += [digest_bytes(row) for row in _rows(batch, sorted(columns), prefixed=True)]
    return found


def batch_digests(batch: Mapping[str, Tensor], columns: Sequence[str]) -> np.ndarray[Any, np.dtype[np.bytes_]]:
    """The same, half of each: sixteen bytes a sample, so that those of millions fit in memory."""
    rows = _rows(batch, sorted(columns), prefixed=True)
    return np.frombuffer(b"".join(hashlib.sha256(row).digest()[:16] for row in rows), dtype="S16")


def _rows(batch: Mapping[str, Tensor], names: Sequence[str], prefixed: bool) -> Iterator[bytes]:
    """What is hashed of each sample, built for a whole batch at once: a call of torch for every value takes minutes."""
    parts = [part for name in names for part in _encode(name, batch[name], prefixed)]
    count = len(batch[names[0]])
    joined = np.concatenate([np.broadcast_to(part, (count, part.shape[-1])) for part in parts], axis=1)
    width, data = joined.shape[1], joined.tobytes()
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
    """`segments` numbers the texts of a row from 1 on; 0 is padding, on the left. Positions begin anew in each text."""

    ids: Integers
    segments: Integers
    positions: Integers

    @property
    def padding(self) -> float:
        """Share of places that hold no token."""
        return float((self.segments == 0).mean())


def cut_texts(texts: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Texts longer than a row become several; of two tokens at least, or there is nothing to predict."""
    pieces = [text[start : start + length] for text in texts for start in range(0, len(text), length)]
    return [piece for piece in pieces if len(piece) > 1]


def pack_texts(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """First fit in the order given: each text goes into the first row with room for it."""
    rows: list[list[Sequence[int]]] = []
    room: list[int] = []
    first = [0] * (length + 1)  # of rows with this much room or more, none comes before
    for text in texts:
        needed = min(len(text), length)  # who is longer is refused where rows are filled
        place = next((i for i in range(first[needed], len(rows)) if room[i] >= needed), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(text)
        room[place] -= needed
        for more in range(needed, length + 1):  # who needs as much or more finds nothing before this place either
            first[more] = max(first[more], place)
    return _fill(rows, length, pad)


def one_text_per_row(texts: Sequence[Sequence[int]], length: int, pad: int) -> PackedRows:
    """Without packing, as requests arrive: what is judged should look like what is served."""
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
            place = slice(start, start := start + len(text))
            ids[index, place] = text
            segments[index, place] = number
            positions[index, place] = np.arange(len(text))
    return PackedRows(ids, segments, positions)


# Those whose masks transformers build from positions, for any number of rows; flash attention does so for one row.
_KNOWN = ("sdpa", "eager", "flex_attention")


def mask_between_texts(model: nn.Module) -> nn.Module:
    """From now on a token sees those before it of its own text: a text begins where `position_ids` begin anew.

    The mask of a batch is not looked at: padding on the left, each place of it at position 0, is seen by no text. A
    pass that goes on with a cache is left as it is. The model itself, its class and the names of its weights stay
    those of transformers.
    """
    names = list(inspect.signature(model.forward).parameters)
    model.register_forward_pre_hook(functools.partial(_keep_apart, names), with_kwargs=True)
    return model


def _keep_apart(
    names: Sequence[str], model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    words = dict(zip(names, given, strict=False)) | named
    mask = words.get("attention_mask")
    if words.get("past_key_values") is None and (mask is None or mask.ndim == 2):
        _check(model, words)
        # With a mask, or with a cache to fill, transformers take a row for one text whatever its positions say.
        words |= {"attention_mask": None, "use_cache": False}
    return (), words


def _check(model: nn.Module, words: dict[str, Any]) -> None:
    kind = getattr(model.config, "_attn_implementation", None)
    if kind not in _KNOWN:
        raise ConfigError(
            f"attention by {kind!r} does not keep the texts of a row apart; "
            f"build the model with attn_implementation={_KNOWN[0]!r}"
        )
    if words.get("position_ids") is None:
        raise DataError("the model is given no position_ids, which tell where each text of a row begins; name them")
