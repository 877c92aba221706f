"""What a split looks like in bounded memory: shapes, gaps, ranges and a histogram of each feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from pipeline.checks.features import LABEL, Floats, Integers, Kind, ids_of, kind_of, missing_of, names_of, numbers_of
from pipeline.spec.files import write_json
from pipeline.spec.frozen import Frozen

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
