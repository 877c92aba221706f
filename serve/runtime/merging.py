"""Requests as parts of one batch: which may run together, joined along the first axis, split back exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.watch import Watch

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Key = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Item:
    """One request that waits. `deadline` is a time of `time.monotonic`; `gone` tells whether its client left."""

    arrays: Arrays
    wanted: tuple[str, ...]
    rows: int
    key: Key
    deadline: float
    gone: Callable[[], bool]
    answer: asyncio.Future[dict[str, Array]]
    since: float
    watch: Watch


def key_of(arrays: Arrays, wanted: tuple[str, ...]) -> tuple[Key, int]:
    """What may run together has one key; and the rows, by the first axis."""
    kinds, rows = [], 0
    for name, array in arrays.items():
        shape = array.shape
        kinds.append((name, array.dtype.char, shape[1:]))
        if shape and shape[0] > rows:
            rows = shape[0]
    return (wanted, tuple(kinds)), rows or 1


def size_of(batch: Sequence[Item]) -> int:
    """Of the inputs, as a power of two."""
    return sum([array.size for item in batch for array in item.arrays.values()]).bit_length()


def rows_of(batch: Sequence[Item]) -> int:
    return sum(item.rows for item in batch)


def merge(batch: Sequence[Item]) -> Arrays:
    if len(batch) == 1:
        return batch[0].arrays
    return {name: np.concatenate([item.arrays[name] for item in batch]) for name in batch[0].arrays}


def split(outputs: Mapping[str, Array], batch: Sequence[Item]) -> list[dict[str, Array]]:
    """Each request's own rows again."""
    if len(batch) == 1:
        return [dict(outputs)]
    rows = rows_of(batch)
    for name, array in outputs.items():
        if array.shape[:1] != (rows,):
            raise ValueError(f"output {name!r} has shape {list(array.shape)} for {rows} rows")
    found, place = [], 0
    for item in batch:
        found.append({name: array[place : place + item.rows] for name, array in outputs.items()})
        place += item.rows
    return found
