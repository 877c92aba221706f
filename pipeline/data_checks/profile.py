"""The profile of a split in bounded memory: schema, missing values, and a histogram of each feature.

Short vectors have a feature per number; images and long vectors are summarized by a few sums per sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from pipeline.contract.results import finite_or_none
from pipeline.contract.settings.section import Frozen

Kind: TypeAlias = Literal["numbers", "sums", "ids"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

LABEL = "class label"  # what a classifier's `actual` returns; no column has a name with a blank
VALUE = "true value"  # what the `actual` of other tasks returns
_MAX_VECTOR_LENGTH = 256  # longer vectors are summarized
_MAX_CODES = 16  # longer rows of integers are texts
_MAX_CLASSES = 64  # up to here distinct integers are categories, not amounts
_PROJECTIONS = 8
SUMS = ("mean", "spread", *(f"projection {i}" for i in range(_PROJECTIONS)))


def feature_kind(values: Tensor) -> Kind:
    """Return how to profile a column, from a sample of its values."""
    is_integer = not (values.is_floating_point() or values.is_complex())
    size = math.prod(values.shape[1:])
    if is_integer and values.dtype != torch.uint8 and values.ndim == 2 and size > _MAX_CODES:
        return "ids"  # of tokens
    if size == 1 and is_integer and len(torch.unique(values)) <= _MAX_CLASSES:
        return "ids"
    return "numbers" if size == 1 or (values.ndim == 2 and size <= _MAX_VECTOR_LENGTH) else "sums"


def feature_names(kind: Kind, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the suffixes of the names of its features."""
    if kind == "sums":
        return tuple(f" ({name})" for name in SUMS)
    size = math.prod(shape)
    return tuple(f"[{i}]" for i in range(size)) if kind == "numbers" and size > 1 else ("",)


def as_floats(column: Tensor) -> Floats:
    """Return a row per sample; complex numbers become two numbers."""
    value = torch.view_as_real(column) if column.is_complex() else column
    flat = value.detach().cpu().reshape(len(value), math.prod(value.shape[1:]))
    return np.asarray(flat.to(torch.float64).numpy())


def feature_values(kind: Kind, column: Tensor) -> Floats:
    """Return the features of each sample; NaN if it has no finite number."""
    values = as_floats(column)
    return _sums(values) if kind == "sums" else values


def as_ids(column: Tensor) -> Integers:
    return np.asarray(column.detach().cpu().reshape(len(column), -1).to(torch.int64).numpy())


def count_missing(column: Tensor) -> int:
    """Return how many numbers are NaN or infinite."""
    if not (column.is_floating_point() or column.is_complex()):
        return 0
    return int(column.numel() - torch.isfinite(column).sum())


def _sums(rows: Floats) -> Floats:
    """Return mean, standard deviation and random projections of the centered values."""
    has_missing = not np.isfinite(rows).all()
    finite = np.isfinite(rows)
    clean = np.where(finite, rows, 0.0) if has_missing else rows
    count = finite.sum(axis=1).astype(np.float64)
    count[count == 0] = np.nan
    mean = clean.sum(axis=1) / count
    centred = np.where(finite, clean - mean[:, None], 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1) / count)
    projected = centred @ _directions(rows.shape[1])
    projected[np.isnan(mean)] = np.nan
    return np.column_stack([mean, deviation, projected])


@functools.lru_cache(maxsize=32)
def _directions(size: int) -> Floats:
    """Return fixed random directions: profiles of different runs must be comparable."""
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (size, _PROJECTIONS)) * 2.0 - 1
    return np.asarray(signs / math.sqrt(max(size, 1)))


_BINS = 32  # equally full in the training split
MAX_IDS = 255  # the most frequent ids have a bin each, the others share one


class ColumnSummary(Frozen):
    """Type, shape and missing values of one column in one split."""

    dtype: str
    shape: tuple[int, ...]  # of a sample
    values: int
    missing: int  # of them, NaN or infinite
    nan: int = 0  # of these, NaN; the export reads it, as clients may then leave the number out


class Histogram(Frozen):
    """Histogram of one feature in one split; a bin includes its upper edge."""

    samples: int
    bins: tuple[int, ...]  # counts below the first edge, between edges, and above the last one
    squares: tuple[int, ...] = ()  # for ids: sums of squared counts per sample, as tokens of one text are dependent
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    spread: float | None = None


class Feature(Frozen):
    column: str
    name: str  # column and suffix
    kind: Kind
    edges: tuple[float, ...] = ()
    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()  # names of the ids, if there are any
    splits: Mapping[str, Histogram] = {}


class Profile(Frozen):
    """`prepare/profile.json`."""

    version: int = 1
    inputs: tuple[str, ...]
    classes: tuple[str, ...] | None
    columns: Mapping[str, Mapping[str, ColumnSummary]]  # split → column
    features: tuple[Feature, ...]


def read_profile(path: Path) -> Profile | None:
    """Return None if there is no profile that this version can read."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def choose_features(pilot: Mapping[str, Tensor]) -> tuple[Feature, ...]:
    """Choose features and the edges of their histograms from samples of the training split."""
    features: list[Feature] = []
    for column, values in pilot.items():
        if values[:1].numel() == 0:
            continue
        kind = "ids" if column == LABEL else feature_kind(values)
        names = [column + name for name in feature_names(kind, tuple(values.shape[1:]))]
        if kind == "ids":
            ids = _frequent_ids(as_ids(values))
            features.append(Feature(column=column, name=names[0], kind=kind, ids=tuple(ids.tolist())))
            continue
        numbers = feature_values(kind, values)
        if values.is_complex() and kind == "numbers":
            names = [f"{name} ({part})" for name in names for part in ("real", "imaginary")]
        for i, name in enumerate(names):
            edges = _edges(numbers[:, i])
            features.append(Feature(column=column, name=name, kind=kind, edges=tuple(edges.tolist())))
    return tuple(features)


def _frequent_ids(ids: Integers) -> Integers:
    values, counts = np.unique(ids, return_counts=True)
    chosen = np.argsort(-counts, kind="stable")[:MAX_IDS]
    return np.asarray(np.sort(values[chosen]))


def _edges(values: Floats) -> Floats:
    """Return quantiles that are values of the data; the outer two enclose all values, so that a constant has a bin."""
    clean = np.sort(values[np.isfinite(values)])
    if not len(clean):
        return np.empty(0)
    indices = (np.arange(1, _BINS) * len(clean)) // _BINS
    just_below = np.nextafter(clean[0], -np.inf)
    return np.asarray(np.unique(np.concatenate([[just_below], clean[indices], clean[-1:]])))


@dataclass
class _FeatureCounts:
    """Running sums of one feature."""

    feature: Feature
    samples: int = 0
    finite: int = 0
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    square: float = 0.0
    shift: float = 0.0  # close to the values, for numerical precision
    bins: Any = 0
    squares: Any = 0

    def add_numbers(self, values: Floats) -> None:
        self.samples += len(values)
        clean = values[np.isfinite(values)]
        if not len(clean):
            return
        if not self.finite:
            self.shift = float(clean[0])
        self.finite += len(clean)
        self.low, self.high = min(self.low, float(clean.min())), max(self.high, float(clean.max()))
        with np.errstate(over="ignore", invalid="ignore"):  # the variance of huge numbers overflows
            centred = clean - self.shift
            self.total, self.square = self.total + float(centred.sum()), self.square + float((centred**2).sum())
        indices = np.searchsorted(np.asarray(self.feature.edges), clean, side="left")
        self.bins = self.bins + np.bincount(indices, minlength=len(self.feature.edges) + 1)

    def add_ids(self, values: Integers) -> None:
        self.samples += len(values)
        ids = np.asarray(self.feature.ids)
        indices = np.searchsorted(ids, values)
        indices = np.where(ids[np.minimum(indices, len(ids) - 1)] == values, indices, len(ids))
        width = len(ids) + 1
        rows = np.arange(len(values))[:, None] * width
        counts = np.bincount((rows + indices).ravel(), minlength=len(values) * width).reshape(-1, width)
        self.bins = self.bins + counts.sum(axis=0)
        self.squares = self.squares + (counts**2).sum(axis=0)
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    def histogram(self) -> Histogram:
        empty = np.zeros(len(self.feature.edges or self.feature.ids) + 1, dtype=np.int64)
        facts: dict[str, float | None] = {"low": finite_or_none(self.low), "high": finite_or_none(self.high)}
        if self.finite:
            mean = self.total / self.finite
            with np.errstate(over="ignore", invalid="ignore"):
                deviation = np.sqrt(max(0.0, np.float64(self.square) / self.finite - np.float64(mean) ** 2))
            facts |= {"mean": finite_or_none(self.shift + mean), "spread": finite_or_none(float(deviation))}
        squares = tuple((empty + self.squares).tolist()) if self.feature.kind == "ids" else ()
        return Histogram(samples=self.samples, bins=tuple((empty + self.bins).tolist()), squares=squares, **facts)


class HistogramBuilder:
    """Histograms of one split over given features, batch by batch."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._by_column: dict[str, list[_FeatureCounts]] = {}
        for feature in features:
            self._by_column.setdefault(feature.column, []).append(_FeatureCounts(feature))

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for column, tallies in self._by_column.items():
            if column in batch:
                self._add_column(batch[column], tallies)

    def _add_column(self, values: Tensor, counts: list[_FeatureCounts]) -> None:
        if counts[0].feature.kind == "ids":
            if not (values.is_floating_point() or values.is_complex()):
                counts[0].add_ids(as_ids(values))
            return
        numbers = np.ascontiguousarray(feature_values(counts[0].feature.kind, values).T)
        if len(numbers) == len(counts):  # other shapes are reported by the schema check
            for feature_counts, row in zip(counts, numbers, strict=True):
                feature_counts.add_numbers(row)

    def histograms(self) -> dict[str, Histogram]:
        """Return the histograms by feature name."""
        tallies = [tally for tallies in self._by_column.values() for tally in tallies]
        return {tally.feature.name: tally.histogram() for tally in tallies if tally.samples}


class SchemaBuilder:
    """Collects types, shapes and missing values of the columns of one split."""

    def __init__(self) -> None:
        self.columns: dict[str, ColumnSummary] = {}

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for name, column in batch.items():
            previous, missing = self.columns.get(name), count_missing(column)
            self.columns[name] = ColumnSummary(
                dtype=str(column.dtype).removeprefix("torch."),
                shape=tuple(column.shape[1:]),
                values=column.numel() + (previous.values if previous else 0),
                missing=missing + (previous.missing if previous else 0),
                nan=(int(torch.isnan(column).sum()) if missing else 0) + (previous.nan if previous else 0),
            )
