"""Pairs of samples in two splits that are nearly one: found by hashing, near linear, and confirmed by a distance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pipeline.checks.features import Floats, Integers

Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]  # sample × table
Digests: TypeAlias = np.ndarray[Any, np.dtype[np.bytes_]]
Nearness: TypeAlias = Callable[[Codes, Codes], np.ndarray[Any, np.dtype[np.int64]]]  # of pairs; smaller is nearer
Distances: TypeAlias = Callable[[tuple[str, Integers], tuple[str, Integers]], Floats]

TABLES = 8
_WINDOW = 16  # samples that share a code are compared with so many others of it, so that a crowd stays cheap
_CONFIRMED = 5_000  # pairs whose distance is worked out, the likeliest ones
_HELD = 200_000  # pairs in memory before the unlikely ones are let go


@dataclass(frozen=True)
class Pair:
    a: tuple[str, int]  # split and index; the earlier split
    b: tuple[str, int]
    distance: float  # as a share of what lies between natural neighbours

    def row(self, column: str) -> dict[str, Any]:
        a, b = ({"split": split, "index": index} for split, index in (self.a, self.b))
        return {"a": a, "b": b, "column": column, "distance": float(f"{self.distance:.4g}")}


@dataclass(frozen=True)
class Search:
    """What is known of every sample: its codes in each split, and digests that tell exact copies."""

    codes: Mapping[str, Codes]
    digests: Mapping[str, Digests]

    def candidates(self, nearness: Nearness, furthest: int) -> tuple[Integers, Integers]:
        """Places, in all splits one after the other, of pairs that share a code; likeliest first, no exact copies."""
        codes = np.concatenate(list(self.codes.values()))
        digests = np.concatenate(list(self.digests.values()))
        split = np.repeat(np.arange(len(self.codes)), [len(found) for found in self.codes.values()])
        count, ranked = len(codes), np.empty((2, 0), np.int64)  # how near, and which pair as one number
        for left, right in _meet(codes, split):
            near = nearness(codes[left], codes[right])
            kept = (near <= furthest) & (digests[left] != digests[right])
            ranked = np.concatenate([ranked, [near[kept], left[kept] * count + right[kept]]], axis=1)
            if ranked.shape[1] > _HELD:
                ranked = _likeliest(ranked)
        pairs = _likeliest(ranked)[1]
        return pairs // max(count, 1), pairs % max(count, 1)

    def confirm(self, places: tuple[Integers, Integers], distances: Distances, limit: float) -> list[Pair]:
        """Those within the limit, in the order of the data."""
        left, right = places
        names, starts = list(self.codes), np.cumsum([0, *(len(found) for found in self.codes.values())])
        sides = [np.searchsorted(starts, side, side="right") - 1 for side in (left, right)]
        found: list[Pair] = []
        for i, a in enumerate(names):
            for j, b in enumerate(names[i + 1 :], i + 1):
                chosen = (sides[0] == i) & (sides[1] == j)
                first, second = left[chosen] - starts[i], right[chosen] - starts[j]
                for x, y, d in zip(first, second, distances((a, first), (b, second)), strict=True):
                    if d <= limit:
                        found.append(Pair((a, int(x)), (b, int(y)), float(d)))
        return sorted(found, key=lambda pair: (pair.b, pair.a))


def _likeliest(ranked: Integers) -> Integers:
    once = ranked[:, np.unique(ranked[1], return_index=True)[1]]
    return np.asarray(once[:, np.argsort(once[0], kind="stable")[:_CONFIRMED]])


def _meet(codes: Codes, split: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Pairs of different splits that stand near each other when sorted by a table's code.

    The next table breaks ties: of a crowd with one code, those that share two stand together.
    """
    for table in range(codes.shape[1]):
        code = codes[:, table]
        order = np.lexsort((codes[:, (table + 1) % codes.shape[1]], code))
        ranked, sides = code[order], split[order]
        for step in range(1, min(_WINDOW, len(codes) - 1) + 1):
            same = np.flatnonzero((ranked[:-step] == ranked[step:]) & (sides[:-step] != sides[step:]))
            first, second = order[same], order[same + step]
            yield np.minimum(first, second), np.maximum(first, second)


_BITS = np.array([i.bit_count() for i in range(256)], dtype=np.uint8)


def different_bits(a: Codes, b: Codes) -> Integers:
    return np.asarray(_BITS[np.ascontiguousarray(a ^ b).view(np.uint8)].sum(axis=1, dtype=np.int64))


def different_tables(a: Codes, b: Codes) -> Integers:
    return np.asarray((a != b).sum(axis=1, dtype=np.int64))
