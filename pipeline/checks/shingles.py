"""Texts as sets of short runs of tokens: MinHash codes, and what share two texts have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor

from pipeline.checks.features import Floats, Integers, ids_of, kind_of
from pipeline.checks.neighbours import TABLES, Codes

_RUN = 3  # tokens of a shingle
_FEWEST = 16  # different ids; a mask is no text
_MINIMA = 4  # a table's code is made of: texts that share four fifths meet in 98 % of cases, strangers hardly ever
_PILOT = 1024
_NEVER = np.uint32(0xFFFFFFFF)

Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class Text:
    """A column of token ids."""

    column: str
    natural: float  # median distance (one less the shared part) of a training text to the nearest other one

    furthest: ClassVar[int] = TABLES - 1  # tables that two may differ in, to be worth a closer look

    @property
    def name(self) -> str:
        return self.column

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    def codes(self, batch: Mapping[str, Tensor]) -> Codes:
        minima = _minima(hashed(ids_of(batch[self.column]))).astype(np.uint64)
        bands = minima.reshape(-1, TABLES, _MINIMA)
        odd = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
        mixed = (bands * odd).sum(axis=2, dtype=np.uint64)
        return np.asarray(mixed >> np.uint64(32), np.uint32)

    def distances(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Floats:
        """Of pairs: what they do not share, as a share of the natural."""
        sides = [hashed(ids_of(batch[self.column])) for batch in (a, b)]
        return np.array([1 - shared(x, y) for x, y in zip(*sides, strict=True)]) / self.natural


def texts_in(pilot: Mapping[str, Tensor], inputs: Sequence[str]) -> list[Text]:
    """Columns of tokens in which training texts differ: a mask, or positions, are none."""
    found = []
    for name in inputs:
        values = pilot[name]
        if values.ndim != 2 or values.shape[1] < 2 * _RUN or kind_of(values) != "ids":
            continue
        ids = ids_of(values)
        counting = float((np.diff(ids, axis=1) == 1).mean())  # of positions, whether texts are packed or not
        if len(np.unique(ids)) >= _FEWEST and counting < 0.5 and (natural := _natural(ids[:_PILOT])):
            found.append(Text(name, natural))
    return found


def hashed(ids: Integers) -> Hashes:
    """A number for each run of tokens; runs of one token, as padding is, are left out."""
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _RUN, axis=1)
    mixed = np.zeros(runs.shape[:2], np.uint64)
    for i in range(_RUN):
        mixed = (mixed ^ runs[:, :, i]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    found = (mixed >> np.uint64(16)).astype(np.uint32)
    return np.where((runs == runs[:, :, :1]).all(axis=2), _NEVER, found)


def shared(a: Hashes, b: Hashes) -> float:
    """Jaccard's measure of two texts' runs."""
    first, second = np.unique(a[a != _NEVER]), np.unique(b[b != _NEVER])
    both = len(np.intersect1d(first, second, assume_unique=True))
    either = len(first) + len(second) - both
    return both / either if either else 0.0


def _minima(hashes: Hashes) -> Hashes:
    """The least of all runs under many hash functions, a few samples at a time so that they stay in the cache."""
    generator = np.random.Generator(np.random.PCG64(3))
    factors = generator.integers(0, 1 << 31, TABLES * _MINIMA, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    found = np.empty((len(hashes), len(factors)), np.uint32)
    for start in range(0, len(hashes), 256):
        part = hashes[start : start + 256]
        gone = part == _NEVER
        for i, factor in enumerate(factors):
            mixed = part * factor
            mixed ^= mixed >> np.uint32(15)
            mixed[gone] = _NEVER
            found[start : start + 256, i] = mixed.min(axis=1)
    return found


def _natural(ids: Integers) -> float:
    """By the share of equal minima, which is Jaccard's measure as closely as it is needed here."""
    minima = _minima(hashed(ids))
    alike = np.zeros((len(minima), len(minima)), np.int64)
    for column in minima.T:
        alike += column[:, None] == column[None]
    np.fill_diagonal(alike, -1)
    alike[alike == minima.shape[1]] = -1  # copies
    nearest = alike.max(axis=1)
    nearest = nearest[nearest >= 0]
    return 1 - float(np.median(nearest)) / minima.shape[1] if len(nearest) else 0.0
