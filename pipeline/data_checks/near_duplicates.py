"""Pairs of samples in two splits that are nearly one: found by hashing, near linear, and confirmed by a distance.

Pictures and vectors as points: perceptual hashes, and what lies between natural neighbours.

Texts as sets of short runs of tokens: MinHash codes, and what share two texts have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.data_checks.profile import Floats, Integers, floats_of, ids_of, kind_of

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


_FEWEST_NUMBERS = 10  # numbers of a sample, for a neighbour to be more than a coincidence
_SIDE = 32  # of the grey picture that is compared
_WAVES = 8  # low frequencies of the cosine transform, each way, that the hash sees
_LONGEST = 1024  # numbers of a vector that is compared; a longer one is projected
_PILOT = 1024  # samples that tell how far natural neighbours are


@dataclass(frozen=True)
class Space:
    """Where samples of these columns are points; far and near is told in units of natural neighbours' distance."""

    columns: tuple[str, ...]
    picture: bool
    centre: Floats
    scale: Floats
    planes: Floats  # a bit of the hash says on which side of one a point lies
    offsets: Floats  # where planes stand; each goes through some training sample, so that they are where samples are
    natural: float  # median distance of a training sample to its nearest neighbour; 0 where there is none to speak of

    @property
    def name(self) -> str:
        more = f" and {len(self.columns) - 1} more" if len(self.columns) > 1 else ""
        return self.columns[0] + more

    @property
    def bits(self) -> int:
        return int(self.planes.shape[1])

    def points(self, batch: Mapping[str, Tensor]) -> Floats:
        return (_raw(batch, self.columns, self.picture) - self.centre) / self.scale

    def codes(self, batch: Mapping[str, Tensor]) -> Codes:
        side = self._sides(self.points(batch)).reshape(-1, TABLES, self.bits // TABLES)
        return np.asarray((side * (1 << np.arange(self.bits // TABLES))).sum(axis=2), np.uint32)

    def furthest(self, batch: Mapping[str, Tensor], limit: float) -> int:
        """Bits in which nearly all copies differ at most, when moved as far as the limit anywhere."""
        points = self.points(batch)[:_PILOT]
        moved = np.random.Generator(np.random.PCG64(4)).standard_normal(points.shape)
        moved *= limit * self.natural / np.sqrt((moved**2).sum(axis=1, keepdims=True))
        flips = (self._sides(points) != self._sides(points + moved)).sum(axis=1)
        return math.ceil(float(np.quantile(flips, 0.99)))

    def _sides(self, points: Floats) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        return np.asarray(points @ self.planes > self.offsets)

    def distances(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Floats:
        """Of pairs, as shares of the natural one."""
        gap = self.points(a) - self.points(b)
        return np.asarray(np.sqrt((gap**2).sum(axis=1)) / self.natural)


def spaces_in(pilot: Mapping[str, Tensor], inputs: Sequence[str], total: int) -> tuple[list[Space], list[str]]:
    """One for each picture and each vector, one for all single numbers together; and why others have none."""
    dense = [name for name in inputs if _is_dense(pilot[name])]
    alone = [name for name in dense if math.prod(pilot[name].shape[1:]) > 1]
    single = tuple(name for name in dense if name not in alone)
    groups = [(name,) for name in alone] + ([single] if single else [])
    found, notes = [], []
    for columns in groups:
        space = _space(pilot, columns, total)
        if space is None:
            notes.append(f"{', '.join(columns)}: too few numbers to tell a near copy from a neighbour")
        elif not space.natural:
            notes.append(f"{space.name}: samples of train do not differ, so near copies cannot be told")
        else:
            found.append(space)
    return found, notes


def is_picture(column: Tensor) -> bool:
    """Grey, or with one, three or four channels first or last."""
    shape = tuple(column.shape[1:])
    if len(shape) == 3 and (shape[0] in (1, 3, 4) or shape[2] in (1, 3, 4)):
        return min(shape[1:] if shape[0] in (1, 3, 4) else shape[:2]) >= _WAVES
    return len(shape) == 2 and min(shape) >= _WAVES


def _is_dense(column: Tensor) -> bool:
    return column.is_floating_point() or column.is_complex() or column.dtype == torch.uint8 or is_picture(column)


def _space(pilot: Mapping[str, Tensor], columns: tuple[str, ...], total: int) -> Space | None:
    some = {name: pilot[name][:_PILOT] for name in columns}
    picture = len(columns) == 1 and is_picture(some[columns[0]])
    raw = _raw(some, columns, picture)
    size = raw.shape[1]
    if size < _FEWEST_NUMBERS:
        return None
    spread = raw.std(axis=0)
    scale = np.ones(size) if picture else np.where(spread > 0, spread, 1.0)
    centre = raw.mean(axis=0)
    planes = _planes(size, _picture_side(some[columns[0]]) if picture else None, total)
    points = (raw - centre) / scale
    through = points[np.random.Generator(np.random.PCG64(5)).integers(0, len(points), planes.shape[1])]
    return Space(
        columns, picture, centre, scale, planes, (through * planes.T).sum(axis=1), _natural_distance(points, total)
    )


def _planes(size: int, side: tuple[int, int] | None, total: int) -> Floats:
    """As many bits a table as leave few strangers in a bucket. Of pictures, mixtures of low frequencies."""
    bits = TABLES * min(24, max(8, math.ceil(math.log2(max(total, 2))) + 1))
    generator = np.random.Generator(np.random.PCG64(1))
    if side is None:
        return np.asarray(generator.standard_normal((size, bits)))
    down, right = (_cosines(length) for length in side)
    waves = np.einsum("ia,jb->ijab", down, right).reshape(size, -1)[:, 1:]  # the first one is the brightness
    return np.asarray(waves @ generator.standard_normal((waves.shape[1], bits)))


def _cosines(length: int) -> Floats:
    place, wave = np.arange(length)[:, None], np.arange(min(_WAVES, length))[None]
    return np.asarray(np.cos(math.pi * (place + 0.5) * wave / length))


def _natural_distance(points: Floats, total: int) -> float:
    """The median, over samples that are no copies, of the distance to the nearest other one of so many.

    Measured among some. Among more the nearest is nearer, by a power that the dimension of the cloud gives, which the
    second neighbour tells (Facco's estimator): else neighbours in a large set would pass for copies.
    """
    norms = (points**2).sum(axis=1)
    squares = norms[:, None] + norms[None] - 2 * points @ points.T
    squares[squares <= 1e-9 * max(float(norms.max(initial=0.0)), 1e-30)] = np.inf  # itself and its copies
    if len(squares) < 3:
        return 0.0
    nearest = np.sqrt(np.partition(squares, 1, axis=1)[:, :2])
    nearest = nearest[np.isfinite(nearest).all(axis=1)]
    if not len(nearest):
        return 0.0
    growth = float(np.log(nearest[:, 1] / nearest[:, 0]).mean())
    return float(np.median(nearest[:, 0]) * min(1.0, len(points) / total) ** growth)


def _raw(batch: Mapping[str, Tensor], columns: Sequence[str], picture: bool) -> Floats:
    if picture:
        return _pictured(batch[columns[0]])
    rows = np.concatenate([floats_of(batch[name]) for name in columns], axis=1)
    rows = np.asarray(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    if rows.shape[1] <= _LONGEST:
        return rows
    signs = np.random.Generator(np.random.PCG64(2)).integers(0, 2, (rows.shape[1], 256)) * 2.0 - 1
    return np.asarray(rows @ signs / math.sqrt(256))


def _pictured(column: Tensor) -> Floats:
    """Grey, small, and the same whatever its brightness and contrast."""
    grey, side = _grey(column), _picture_side(column)
    if grey.shape[1:] != side:
        grey = functional.adaptive_avg_pool2d(grey[:, None], side)
    small = grey.flatten(1).double().numpy()
    small = small - small.mean(axis=1, keepdims=True)
    length = np.sqrt((small**2).sum(axis=1, keepdims=True))
    return np.asarray(small / np.where(length > 0, length, 1.0))


def _picture_side(column: Tensor) -> tuple[int, int]:
    height, width = _grey(column[:1]).shape[1:]
    return min(_SIDE, height), min(_SIDE, width)


def _grey(column: Tensor) -> Tensor:
    value = column.detach().cpu().float()
    if value.ndim == 4:
        value = value.mean(dim=1 if value.shape[1] in (1, 3, 4) else 3)
    return torch.nan_to_num(value, posinf=0.0, neginf=0.0)


_RUN = 3  # tokens of a shingle
_FEWEST_IDS = 16  # different ids; a mask is no text
_MINIMA = 4  # a table's code is made of: texts that share four fifths meet in 98 % of cases, strangers hardly ever
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
        if len(np.unique(ids)) >= _FEWEST_IDS and counting < 0.5 and (natural := _natural_overlap(ids[:_PILOT])):
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


def _natural_overlap(ids: Integers) -> float:
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
