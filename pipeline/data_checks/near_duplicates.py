"""Near-duplicates between splits: candidates from locality-sensitive hashing, confirmed by a distance.

Images and vectors are points with random-hyperplane hashes. Texts are sets of token shingles with MinHash codes and
Jaccard distance. Distances are relative to the usual distance of a training sample to its nearest neighbor.
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

from pipeline.data_checks.profile import Floats, Integers, as_floats, as_ids, feature_kind
from pipeline.system.wording import join_names

Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]  # sample × table
Digests: TypeAlias = np.ndarray[Any, np.dtype[np.bytes_]]
PairDistance: TypeAlias = Callable[[Codes, Codes], np.ndarray[Any, np.dtype[np.int64]]]  # of pairs; smaller is nearer
Distances: TypeAlias = Callable[[tuple[str, Integers], tuple[str, Integers]], Floats]

NEAR_DUPLICATE_DISTANCE = 0.25  # fraction of the usual distance between neighbors
TABLES = 8
_MAX_NEIGHBORS = 16  # with the same code that a sample is compared with, so that large groups stay cheap
_MAX_PAIRS = 5_000  # whose distance is computed
_MAX_RANKED = 200_000  # pairs in memory before distant ones are dropped


@dataclass(frozen=True)
class Pair:
    a: tuple[str, int]  # split and index; the earlier split
    b: tuple[str, int]
    distance: float  # relative to the usual distance between neighbors

    def row(self, column: str) -> dict[str, Any]:
        a, b = ({"split": split, "index": index} for split, index in (self.a, self.b))
        return {"a": a, "b": b, "column": column, "distance": float(f"{self.distance:.4g}")}


@dataclass(frozen=True)
class CandidateSearch:
    """Hash codes of the samples of each split, and digests that identify exact copies."""

    codes: Mapping[str, Codes]
    digests: Mapping[str, Digests]

    def candidates(self, distance: PairDistance, max_difference: int) -> tuple[Integers, Integers]:
        """Return pairs that share a code, nearest first, without exact copies, as indices into all splits in order."""
        codes = np.concatenate(list(self.codes.values()))
        digests = np.concatenate(list(self.digests.values()))
        split = np.repeat(np.arange(len(self.codes)), [len(part) for part in self.codes.values()])
        count, nearest = len(codes), np.empty((2, 0), np.int64)  # distance of the codes, and the pair as one number
        for left, right in _colliding_pairs(codes, split):
            distances = distance(codes[left], codes[right])
            is_near = (distances <= max_difference) & (digests[left] != digests[right])
            nearest = np.concatenate([nearest, [distances[is_near], left[is_near] * count + right[is_near]]], axis=1)
            if nearest.shape[1] > _MAX_RANKED:
                nearest = _nearest_pairs(nearest)
        pairs = _nearest_pairs(nearest)[1]
        return pairs // max(count, 1), pairs % max(count, 1)

    def confirm(self, candidates: tuple[Integers, Integers], distances: Distances, limit: float) -> list[Pair]:
        """Return the pairs within the limit, in the order of the data."""
        left, right = candidates
        names, starts = list(self.codes), np.cumsum([0, *(len(part) for part in self.codes.values())])
        sides = [np.searchsorted(starts, side, side="right") - 1 for side in (left, right)]
        pairs: list[Pair] = []
        for i, a in enumerate(names):
            for j, b in enumerate(names[i + 1 :], i + 1):
                chosen = (sides[0] == i) & (sides[1] == j)
                first, second = left[chosen] - starts[i], right[chosen] - starts[j]
                for x, y, d in zip(first, second, distances((a, first), (b, second)), strict=True):
                    if d <= limit:
                        pairs.append(Pair((a, int(x)), (b, int(y)), float(d)))
        return sorted(pairs, key=lambda pair: (pair.b, pair.a))


def _nearest_pairs(ranked: Integers) -> Integers:
    unique = ranked[:, np.unique(ranked[1], return_index=True)[1]]
    return np.asarray(unique[:, np.argsort(unique[0], kind="stable")[:_MAX_PAIRS]])


def _colliding_pairs(codes: Codes, split: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Yield pairs of different splits that are adjacent when sorted by the code of a table.

    The next table breaks ties, so that samples that share two codes are adjacent.
    """
    for table in range(codes.shape[1]):
        code = codes[:, table]
        order = np.lexsort((codes[:, (table + 1) % codes.shape[1]], code))
        ranked, sides = code[order], split[order]
        for step in range(1, min(_MAX_NEIGHBORS, len(codes) - 1) + 1):
            matches = np.flatnonzero((ranked[:-step] == ranked[step:]) & (sides[:-step] != sides[step:]))
            first, second = order[matches], order[matches + step]
            yield np.minimum(first, second), np.maximum(first, second)


_BITS = np.array([i.bit_count() for i in range(256)], dtype=np.uint8)


def count_different_bits(a: Codes, b: Codes) -> Integers:
    return np.asarray(_BITS[np.ascontiguousarray(a ^ b).view(np.uint8)].sum(axis=1, dtype=np.int64))


def count_different_tables(a: Codes, b: Codes) -> Integers:
    return np.asarray((a != b).sum(axis=1, dtype=np.int64))


_MIN_NUMBERS = 10  # per sample; rows of fewer are compared by `copies.py`
_IMAGE_SIDE = 32  # pixels of the greyscale image that is compared
_FREQUENCIES = 8  # lowest frequencies of the cosine transform per axis that are hashed
_MAX_NUMBERS = 1024  # per vector; longer ones are projected
_PILOT_SAMPLES = 1024  # to estimate the distance of neighbors


@dataclass(frozen=True)
class FeatureSpace:
    """A space in which samples are points; distances are relative to the usual distance of neighbors."""

    columns: tuple[str, ...]
    image: bool
    centre: Floats
    scale: Floats
    planes: Floats  # a bit of the hash is the side of a plane
    offsets: Floats  # each plane goes through a training sample
    neighbor_distance: float  # median distance of a training sample to its nearest neighbor; 0 if undefined

    @property
    def name(self) -> str:
        return group_name(self.columns)

    @property
    def bits(self) -> int:
        return int(self.planes.shape[1])

    def points(self, batch: Mapping[str, Tensor]) -> Floats:
        return (_raw_values(batch, self.columns, self.image) - self.centre) / self.scale

    def codes(self, batch: Mapping[str, Tensor]) -> Codes:
        side = self._sides(self.points(batch)).reshape(-1, TABLES, self.bits // TABLES)
        return np.asarray((side * (1 << np.arange(self.bits // TABLES))).sum(axis=2), np.uint32)

    def max_difference(self, batch: Mapping[str, Tensor], limit: float) -> int:
        """Return the number of bits in which 99% of copies differ at most, if moved by the limit."""
        points = self.points(batch)[:_PILOT_SAMPLES]
        shifts = np.random.Generator(np.random.PCG64(4)).standard_normal(points.shape)
        shifts *= limit * self.neighbor_distance / np.sqrt((shifts**2).sum(axis=1, keepdims=True))
        flips = (self._sides(points) != self._sides(points + shifts)).sum(axis=1)
        return math.ceil(float(np.quantile(flips, 0.99)))

    def _sides(self, points: Floats) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        return np.asarray(points @ self.planes > self.offsets)

    def distances(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Floats:
        """Return distances of pairs relative to the distance of neighbors."""
        gap = self.points(a) - self.points(b)
        return np.asarray(np.sqrt((gap**2).sum(axis=1)) / self.neighbor_distance)


def group_name(columns: Sequence[str]) -> str:
    return join_names(columns, 1)


def find_spaces(
    pilot: Mapping[str, Tensor], inputs: Sequence[str], total: int
) -> tuple[list[FeatureSpace], list[tuple[str, ...]], list[str]]:
    """Return a space per image and vector and one for all scalars, columns with too few numbers for one, and notes."""
    dense = [name for name in inputs if _is_dense(pilot[name])]
    arrays = [name for name in dense if math.prod(pilot[name].shape[1:]) > 1]
    single = tuple(name for name in dense if name not in arrays)
    groups = [(name,) for name in arrays] + ([single] if single else [])
    spaces, short, notes = [], [], []
    for columns in groups:
        space = _build_space(pilot, columns, total)
        if space is None:
            short.append(columns)
        elif not space.neighbor_distance:
            notes.append(f"{space.name}: samples of train do not differ, so near-duplicates cannot be detected")
        else:
            spaces.append(space)
    return spaces, short, notes


def is_image(column: Tensor) -> bool:
    """Whether samples are greyscale or have one, three or four channels, first or last."""
    shape = tuple(column.shape[1:])
    if len(shape) == 3 and (shape[0] in (1, 3, 4) or shape[2] in (1, 3, 4)):
        return min(shape[1:] if shape[0] in (1, 3, 4) else shape[:2]) >= _FREQUENCIES
    return len(shape) == 2 and min(shape) >= _FREQUENCIES


def _is_dense(column: Tensor) -> bool:
    return column.is_floating_point() or column.is_complex() or column.dtype == torch.uint8 or is_image(column)


def _build_space(pilot: Mapping[str, Tensor], columns: tuple[str, ...], total: int) -> FeatureSpace | None:
    sample = {name: pilot[name][:_PILOT_SAMPLES] for name in columns}
    image = len(columns) == 1 and is_image(sample[columns[0]])
    raw = _raw_values(sample, columns, image)
    size = raw.shape[1]
    if size < _MIN_NUMBERS:
        return None
    deviation = raw.std(axis=0)
    scale = np.ones(size) if image else np.where(deviation > 0, deviation, 1.0)
    centre = raw.mean(axis=0)
    planes = _planes(size, _image_side(sample[columns[0]]) if image else None, total)
    points = (raw - centre) / scale
    anchors = points[np.random.Generator(np.random.PCG64(5)).integers(0, len(points), planes.shape[1])]
    return FeatureSpace(
        columns, image, centre, scale, planes, (anchors * planes.T).sum(axis=1), _neighbor_distance(points, total)
    )


def _planes(size: int, side: tuple[int, int] | None, total: int) -> Floats:
    """Return random planes with enough bits per table for small buckets; for images, of low frequencies."""
    bits = TABLES * min(24, max(8, math.ceil(math.log2(max(total, 2))) + 1))
    generator = np.random.Generator(np.random.PCG64(1))
    if side is None:
        return np.asarray(generator.standard_normal((size, bits)))
    vertical, horizontal = (_cosines(length) for length in side)
    waves = np.einsum("ia,jb->ijab", vertical, horizontal).reshape(size, -1)[:, 1:]  # the first one is the brightness
    return np.asarray(waves @ generator.standard_normal((waves.shape[1], bits)))


def _cosines(length: int) -> Floats:
    position, wave = np.arange(length)[:, None], np.arange(min(_FREQUENCIES, length))[None]
    return np.asarray(np.cos(math.pi * (position + 0.5) * wave / length))


def _neighbor_distance(points: Floats, total: int) -> float:
    """Return the median distance to the nearest neighbor that is not a copy, extrapolated to `total` samples.

    In a larger set neighbors are closer, by a power that depends on the intrinsic dimension, which is estimated from
    the second neighbor (Facco et al.). Without it, neighbors in a large set would count as near-duplicates.
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


def number_rows(batch: Mapping[str, Tensor], columns: Sequence[str]) -> Floats:
    rows = np.concatenate([as_floats(batch[name]) for name in columns], axis=1)
    return np.asarray(np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))


def _raw_values(batch: Mapping[str, Tensor], columns: Sequence[str], image: bool) -> Floats:
    if image:
        return _normalized_image(batch[columns[0]])
    rows = number_rows(batch, columns)
    if rows.shape[1] <= _MAX_NUMBERS:
        return rows
    signs = np.random.Generator(np.random.PCG64(2)).integers(0, 2, (rows.shape[1], 256)) * 2.0 - 1
    return np.asarray(rows @ signs / math.sqrt(256))


def _normalized_image(column: Tensor) -> Floats:
    """Return a small greyscale image, normalized for brightness and contrast."""
    pixels = small_pictures(column).flatten(1).double().numpy()
    pixels = pixels - pixels.mean(axis=1, keepdims=True)
    length = np.sqrt((pixels**2).sum(axis=1, keepdims=True))
    return np.asarray(pixels / np.where(length > 0, length, 1.0))


def small_pictures(column: Tensor) -> Tensor:
    """Return small greyscale images."""
    grey, side = _greyscale(column), _image_side(column)
    return grey if grey.shape[1:] == side else functional.adaptive_avg_pool2d(grey[:, None], side)[:, 0]


def _image_side(column: Tensor) -> tuple[int, int]:
    height, width = _greyscale(column[:1]).shape[1:]
    return min(_IMAGE_SIDE, height), min(_IMAGE_SIDE, width)


def _greyscale(column: Tensor) -> Tensor:
    value = column.detach().cpu().float()
    if value.ndim == 4:
        value = value.mean(dim=1 if value.shape[1] in (1, 3, 4) else 3)
    return torch.nan_to_num(value, posinf=0.0, neginf=0.0)


_SHINGLE_TOKENS = 3  # per shingle
_MIN_DISTINCT_IDS = 16  # a mask is not a text
_HASHES_PER_TABLE = 4  # texts with a Jaccard index of 0.8 share a code with 98% probability
_NO_SHINGLE = np.uint32(0xFFFFFFFF)

Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True)
class TextColumn:
    """A column of token ids."""

    name: str
    neighbor_distance: float  # median Jaccard distance of a training text to the nearest other one

    max_difference: ClassVar[int] = TABLES - 1  # tables in which candidates may differ

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.name,)

    def codes(self, batch: Mapping[str, Tensor]) -> Codes:
        minima = _minhashes(shingle_hashes(as_ids(batch[self.name]))).astype(np.uint64)
        bands = minima.reshape(-1, TABLES, _HASHES_PER_TABLE)
        multipliers = np.array(
            [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
        )
        hashes = (bands * multipliers).sum(axis=2, dtype=np.uint64)
        return np.asarray(hashes >> np.uint64(32), np.uint32)

    def distances(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Floats:
        """Return Jaccard distances of pairs relative to that of neighbors."""
        sides = [shingle_hashes(as_ids(batch[self.name])) for batch in (a, b)]
        return np.array([1 - jaccard(x, y) for x, y in zip(*sides, strict=True)]) / self.neighbor_distance


def find_texts(pilot: Mapping[str, Tensor], inputs: Sequence[str]) -> list[TextColumn]:
    """Return the columns of token ids; masks and positions are not texts."""
    columns = []
    for name in inputs:
        values = pilot[name]
        if values.ndim != 2 or values.shape[1] < 2 * _SHINGLE_TOKENS or feature_kind(values) != "ids":
            continue
        ids = as_ids(values)
        counting = float((np.diff(ids, axis=1) == 1).mean())  # positions increase by one, in packed texts too
        if (
            len(np.unique(ids)) >= _MIN_DISTINCT_IDS
            and counting < 0.5
            and (neighbor_distance := _neighbor_text_distance(ids[:_PILOT_SAMPLES]))
        ):
            columns.append(TextColumn(name, neighbor_distance))
    return columns


def shingle_hashes(ids: Integers) -> Hashes:
    """Return a hash for each shingle; shingles of a single token, such as padding, are left out."""
    runs = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), _SHINGLE_TOKENS, axis=1)
    mixed = np.zeros(runs.shape[:2], np.uint64)
    for i in range(_SHINGLE_TOKENS):
        mixed = (mixed ^ runs[:, :, i]) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    hashes = (mixed >> np.uint64(16)).astype(np.uint32)
    return np.where((runs == runs[:, :, :1]).all(axis=2), _NO_SHINGLE, hashes)


def jaccard(a: Hashes, b: Hashes) -> float:
    """Return the Jaccard index of two sets of shingles."""
    first, second = np.unique(a[a != _NO_SHINGLE]), np.unique(b[b != _NO_SHINGLE])
    shared = len(np.intersect1d(first, second, assume_unique=True))
    total = len(first) + len(second) - shared
    return shared / total if total else 0.0


def _minhashes(hashes: Hashes) -> Hashes:
    """Return the minimum over shingles of each hash function (MinHash), in batches that fit into the CPU cache."""
    generator = np.random.Generator(np.random.PCG64(3))
    factors = generator.integers(0, 1 << 31, TABLES * _HASHES_PER_TABLE, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    minima = np.empty((len(hashes), len(factors)), np.uint32)
    for start in range(0, len(hashes), 256):
        part = hashes[start : start + 256]
        empty = part == _NO_SHINGLE
        for i, factor in enumerate(factors):
            mixed = part * factor
            mixed ^= mixed >> np.uint32(15)
            mixed[empty] = _NO_SHINGLE
            minima[start : start + 256, i] = mixed.min(axis=1)
    return minima


def _neighbor_text_distance(ids: Integers) -> float:
    """Return the median distance to the nearest text, estimated by the fraction of equal MinHash values."""
    minima = _minhashes(shingle_hashes(ids))
    equal_hashes = np.zeros((len(minima), len(minima)), np.int64)
    for column in minima.T:
        equal_hashes += column[:, None] == column[None]
    np.fill_diagonal(equal_hashes, -1)
    equal_hashes[equal_hashes == minima.shape[1]] = -1  # copies
    nearest = equal_hashes.max(axis=1)
    nearest = nearest[nearest >= 0]
    return 1 - float(np.median(nearest)) / minima.shape[1] if len(nearest) else 0.0
