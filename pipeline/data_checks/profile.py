"""What a split looks like in bounded memory: shapes, gaps, ranges and a histogram of each feature.

What is looked at of a column: its own numbers while they are few, a few sums of each sample where they are many.
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

from pipeline.contract.files import write_json
from pipeline.contract.settings.section import Frozen

Kind: TypeAlias = Literal["numbers", "sums", "ids"]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

LABEL = "class label"  # what a classifier's `actual` gives; with a blank, as no column has
_COMPONENTS = 256  # a vector this long is looked at number by number
_CODES = 16  # integers in a row up to here are separate facts; more are a text
_CLASSES = 64  # distinct integers up to here are names, not amounts
_PROJECTIONS = 8
SUMS = ("mean", "spread", *(f"projection {i}" for i in range(_PROJECTIONS)))


def kind_of(values: Tensor) -> Kind:
    """From a good many samples of the column."""
    whole = not (values.is_floating_point() or values.is_complex())
    size = math.prod(values.shape[1:])
    if whole and values.dtype != torch.uint8 and values.ndim == 2 and size > _CODES:
        return "ids"  # of tokens
    if size == 1 and whole and len(torch.unique(values)) <= _CLASSES:
        return "ids"
    return "numbers" if size == 1 or (values.ndim == 2 and size <= _COMPONENTS) else "sums"


def names_of(kind: Kind, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Of its features, to stand behind the column's name."""
    if kind == "sums":
        return tuple(f" ({name})" for name in SUMS)
    size = math.prod(shape)
    return tuple(f"[{i}]" for i in range(size)) if kind == "numbers" and size > 1 else ("",)


def floats_of(column: Tensor) -> Floats:
    """A row for each sample; complex numbers are two."""
    value = torch.view_as_real(column) if column.is_complex() else column
    flat = value.detach().cpu().reshape(len(value), math.prod(value.shape[1:]))
    return np.asarray(flat.to(torch.float64).numpy())


def numbers_of(kind: Kind, column: Tensor) -> Floats:
    """Features of each sample; NaN where there is nothing finite to sum."""
    found = floats_of(column)
    return _sums(found) if kind == "sums" else found


def ids_of(column: Tensor) -> Integers:
    return np.asarray(column.detach().cpu().reshape(len(column), -1).to(torch.int64).numpy())


def missing_of(column: Tensor) -> int:
    """How many of its numbers are NaN or infinite."""
    if not (column.is_floating_point() or column.is_complex()):
        return 0
    return int(column.numel() - torch.isfinite(column).sum())


def _sums(rows: Floats) -> Floats:
    """Mean, spread and projections. The projections do not see the mean, so that they tell something else."""
    with_gaps = not np.isfinite(rows).all()
    finite = np.isfinite(rows)
    clean = np.where(finite, rows, 0.0) if with_gaps else rows
    count = finite.sum(axis=1).astype(np.float64)
    count[count == 0] = np.nan
    mean = clean.sum(axis=1) / count
    centred = np.where(finite, clean - mean[:, None], 0.0)
    spread = np.sqrt((centred**2).sum(axis=1) / count)
    projected = centred @ _directions(rows.shape[1])
    projected[np.isnan(mean)] = np.nan
    return np.column_stack([mean, spread, projected])


@functools.lru_cache(maxsize=32)
def _directions(size: int) -> Floats:
    """The same on every machine, for ever: profiles of different runs are compared through them."""
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (size, _PROJECTIONS)) * 2.0 - 1
    return np.asarray(signs / math.sqrt(max(size, 1)))


_BINS = 32  # equally full in the training split
MOST_IDS = 255  # the most frequent ones have a bin each, the others share one


class Facts(Frozen):
    """Of one column in one split."""

    dtype: str
    shape: tuple[int, ...]  # of a sample
    values: int
    missing: int  # of them, NaN or infinite


class Histogram(Frozen):
    """Of one feature in one split; a bin reaches from one edge, without it, to the next, with it."""

    samples: int
    bins: tuple[int, ...]  # what lies below the first edge, between, and above the last one
    squares: tuple[int, ...] = ()  # ids: sums of each sample's count squared, for tokens of one text go together
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    spread: float | None = None


class Feature(Frozen):
    column: str
    name: str  # column and what of it
    kind: Kind
    edges: tuple[float, ...] = ()
    ids: tuple[int, ...] = ()
    words: tuple[str, ...] = ()  # for ids, where they have any
    splits: Mapping[str, Histogram] = {}


class Profile(Frozen):
    """`prepare/profile.json`."""

    version: int = 1
    inputs: tuple[str, ...]
    classes: tuple[str, ...] | None
    columns: Mapping[str, Mapping[str, Facts]]  # split → column
    features: tuple[Feature, ...]


def write_profile(path: Path, profile: Profile) -> None:
    write_json(path, profile.model_dump(mode="json"))


def read_profile(path: Path) -> Profile | None:
    """None where there is none that this version understands."""
    try:
        return Profile.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def lay_out(pilot: Mapping[str, Tensor]) -> tuple[Feature, ...]:
    """Which features to look at, and where their histograms' edges are, from some samples of the training split."""
    found: list[Feature] = []
    for column, values in pilot.items():
        if values[:1].numel() == 0:
            continue
        kind = "ids" if column == LABEL else kind_of(values)
        names = [column + name for name in names_of(kind, tuple(values.shape[1:]))]
        if kind == "ids":
            ids = _frequent(ids_of(values))
            found.append(Feature(column=column, name=names[0], kind=kind, ids=tuple(ids.tolist())))
            continue
        numbers = numbers_of(kind, values)
        if values.is_complex() and kind == "numbers":
            names = [f"{name} ({part})" for name in names for part in ("real", "imaginary")]
        for i, name in enumerate(names):
            edges = _edges(numbers[:, i])
            found.append(Feature(column=column, name=name, kind=kind, edges=tuple(edges.tolist())))
    return tuple(found)


def _frequent(ids: Integers) -> Integers:
    values, counts = np.unique(ids, return_counts=True)
    chosen = np.argsort(-counts, kind="stable")[:MOST_IDS]
    return np.asarray(np.sort(values[chosen]))


def _edges(values: Floats) -> Floats:
    """Quantiles, each a value that occurs; the outermost two fence in all there is, so that a constant has a place."""
    clean = np.sort(values[np.isfinite(values)])
    if not len(clean):
        return np.empty(0)
    places = (np.arange(1, _BINS) * len(clean)) // _BINS
    below = np.nextafter(clean[0], -np.inf)
    return np.asarray(np.unique(np.concatenate([[below], clean[places], clean[-1:]])))


@dataclass
class _Tally:
    """Running sums of one feature."""

    feature: Feature
    samples: int = 0
    finite: int = 0
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    square: float = 0.0
    shift: float = 0.0  # near the values, so that squares of large ones keep their digits
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
        with np.errstate(over="ignore", invalid="ignore"):  # numbers near the largest there is have no spread to tell
            centred = clean - self.shift
            self.total, self.square = self.total + float(centred.sum()), self.square + float((centred**2).sum())
        places = np.searchsorted(np.asarray(self.feature.edges), clean, side="left")
        self.bins = self.bins + np.bincount(places, minlength=len(self.feature.edges) + 1)

    def add_ids(self, values: Integers) -> None:
        self.samples += len(values)
        ids = np.asarray(self.feature.ids)
        places = np.searchsorted(ids, values)
        places = np.where(ids[np.minimum(places, len(ids) - 1)] == values, places, len(ids))
        width = len(ids) + 1
        rows = np.arange(len(values))[:, None] * width
        counts = np.bincount((rows + places).ravel(), minlength=len(values) * width).reshape(-1, width)
        self.bins = self.bins + counts.sum(axis=0)
        self.squares = self.squares + (counts**2).sum(axis=0)
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    def histogram(self) -> Histogram:
        empty = np.zeros(len(self.feature.edges or self.feature.ids) + 1, dtype=np.int64)
        facts: dict[str, float | None] = {"low": _finite(self.low), "high": _finite(self.high)}
        if self.finite:
            mean = self.total / self.finite
            with np.errstate(over="ignore", invalid="ignore"):
                spread = np.sqrt(max(0.0, np.float64(self.square) / self.finite - np.float64(mean) ** 2))
            facts |= {"mean": _finite(self.shift + mean), "spread": _finite(float(spread))}
        squares = tuple((empty + self.squares).tolist()) if self.feature.kind == "ids" else ()
        return Histogram(samples=self.samples, bins=tuple((empty + self.bins).tolist()), squares=squares, **facts)


class Sketch:
    """Histograms of one split over given features, batch by batch."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._by_column: dict[str, list[_Tally]] = {}
        for feature in features:
            self._by_column.setdefault(feature.column, []).append(_Tally(feature))

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for column, tallies in self._by_column.items():
            if column in batch:
                self._add_column(batch[column], tallies)

    def _add_column(self, values: Tensor, tallies: list[_Tally]) -> None:
        if tallies[0].feature.kind == "ids":
            if not (values.is_floating_point() or values.is_complex()):
                tallies[0].add_ids(ids_of(values))
            return
        numbers = np.ascontiguousarray(numbers_of(tallies[0].feature.kind, values).T)
        if len(numbers) == len(tallies):  # another shape is told by the schema
            for tally, row in zip(tallies, numbers, strict=True):
                tally.add_numbers(row)

    def histograms(self) -> dict[str, Histogram]:
        """By the feature's name."""
        tallies = [tally for tallies in self._by_column.values() for tally in tallies]
        return {tally.feature.name: tally.histogram() for tally in tallies if tally.samples}


class Shapes:
    """What the columns of one split are, and how much of them is missing."""

    def __init__(self) -> None:
        self._found: dict[str, Facts] = {}

    def add(self, batch: Mapping[str, Tensor]) -> None:
        for name, column in batch.items():
            before = self._found.get(name)
            self._found[name] = Facts(
                dtype=str(column.dtype).removeprefix("torch."),
                shape=tuple(column.shape[1:]),
                values=column.numel() + (before.values if before else 0),
                missing=missing_of(column) + (before.missing if before else 0),
            )

    def facts(self) -> dict[str, Facts]:
        return self._found


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
