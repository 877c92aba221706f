"""Compare a graph with torch: run a case, and measure how far each of its outputs is off.

A graph is any function from inputs to outputs: a session of ONNX Runtime, a program of torch.export, a SavedModel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from export.tolerance import Scales, allowed_error, is_within
from pipeline.contract.settings.stages import Export
from pipeline.system.errors import StageError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
Rows = list[dict[str, Any]]
Graph = Callable[[Mapping[str, Array]], Mapping[str, Array]]
Tolerance = Callable[[Arrays], Export]  # settings with rtol and atol, for torch's outputs of a case


@dataclass(frozen=True)
class Case:
    """One batch and torch's outputs for it."""

    kind: str  # of inputs, as parity.json names them
    text: str
    feed: Arrays
    expected: Arrays
    masks: Mapping[str, Array] = field(default_factory=dict)  # by output: which places are no padding
    chosen: str = ""  # the output whose argmax is the prediction

    @property
    def rows(self) -> int:
        return len(next(iter(self.feed.values())))

    def unpadded(self, outputs: Mapping[str, Array]) -> Arrays:
        """Leave out padded places of outputs that have one value per position."""
        return {name: _select(outputs[name], self.masks.get(name)) for name in self.expected}


def _select(array: Array, mask: Array | None) -> Array:
    return array if mask is None or array.shape[: mask.ndim] != mask.shape else array[mask]


@dataclass
class Attempts:
    """The cases that were tried, and those that could not be compared."""

    count: int = 0
    failures: list[str] = field(default_factory=list)  # cases on which the model itself fails, with its words
    left_out: list[str] = field(default_factory=list)  # for other reasons
    advice: str = ""

    @property
    def text(self) -> str:
        """Return how many cases the model itself fails on; empty if there are none."""
        if not self.failures:
            return ""
        return (
            f"{len(self.failures)} of {self.count} cases were not compared, because the model itself fails on them, "
            f"first on {self.failures[0]}{self.advice}"
        )


@dataclass(frozen=True)
class Comparison:
    """The outputs of a graph compared with torch's: for one case, several of a kind, or the whole test set."""

    batch_size: int
    max_abs_error: float
    max_rel_error: float
    beyond_tolerance: int  # elements
    flips: int  # samples whose predicted class changed
    unexplained_flips: int  # of those, samples whose outputs are not equal within tolerance
    metrics: Mapping[str, float]
    seconds: float
    worst: str  # output and sample of the largest error
    changed_metrics: tuple[str, ...] = ()  # a sentence for each that differs from torch's beyond rounding


def compare(graph: Graph, case: Case, config: Export, scales: Scales | None = None) -> Comparison:
    """Run a graph on a case and compare its outputs; `scales`: of torch's outputs for the test set.

    NaN equals NaN where the inputs have missing numbers.
    """
    started = time.perf_counter()
    outputs = graph(case.feed)
    seconds = time.perf_counter() - started
    beyond_tolerance, flips, unexplained, largest, relative, worst = 0, 0, 0, 0.0, 0.0, case.text
    equal_nan, actual_outputs = has_missing(case.feed), case.unpadded(outputs)
    for name, expected in case.unpadded(case.expected).items():
        actual = actual_outputs[name]
        if actual.shape != expected.shape:
            shapes = f"`{name}` of shape {actual.shape}, torch {expected.shape}"
            squeezed = actual.shape == (1, *expected.shape)
            fix = "; to fix it: name the axis in squeeze(), which also drops that of a single row" if squeezed else ""
            raise StageError(f"at {case.text}, the ONNX file returns {shapes}{fix}")
        close = is_within(actual, expected, allowed_error(expected, config, (scales or {}).get(name)))
        if equal_nan:
            close |= np.isnan(actual) & np.isnan(expected)
        error = np.nan_to_num(distance(actual, expected), nan=np.inf)
        if expected.dtype.kind in "iu" and expected.ndim == 1:
            tied = tied_rows(case.expected, len(expected), config, scales or {})
            close |= tied
            error[tied] = 0.0
        if equal_nan:
            error[np.isnan(actual) & np.isnan(expected)] = 0.0
        beyond_tolerance += int((~close).sum())
        if error.size and error.max() >= largest:
            largest, worst = float(error.max()), f"`{name}` at {case.text}"
        if error.size:
            relative = max(relative, float((error / np.fmax(np.abs(expected), 1e-12)).max()))
        if name == case.chosen:
            flipped = actual.argmax(axis=-1) != expected.argmax(axis=-1)
            flips, unexplained = int(flipped.sum()), int((flipped & ~close.all(axis=-1)).sum())
    return Comparison(
        case.rows, finite(largest), finite(relative), beyond_tolerance, flips, unexplained, {}, seconds, worst
    )


def tied_rows(outputs: Arrays, rows: int, config: Export, scales: Scales) -> Array:
    """Return the rows whose label is a choice between two equal scores of an output."""
    tied = np.zeros(rows, dtype=bool)
    for name, scores in outputs.items():
        if scores.dtype.kind == "f" and scores.ndim == 2 and len(scores) == rows and scores.shape[1] > 1:
            best = np.sort(scores, axis=1)[:, -2:]
            tied |= is_within(best[:, 0], best[:, 1], allowed_error(scores, config, scales.get(name)).max(axis=1))
    return tied


def compare_kinds(
    graph: Graph, cases: Iterable[Case], tolerance: Tolerance, place: str, scales: Scales | None = None
) -> Rows:
    """Return a row for parity.json for each kind of cases, that names the worst."""
    parts: dict[str, list[Comparison]] = {}
    for case in cases:
        parts.setdefault(case.kind, []).append(compare(graph, case, tolerance(case.expected), scales))
    return [combined_row(parts_of_kind, kind, place) for kind, parts_of_kind in parts.items()]


def combine(parts: Sequence[Comparison]) -> Comparison:
    """Combine comparisons of several cases into one that names the worst."""
    worst = max(parts, key=lambda part: (part.beyond_tolerance > 0, part.max_abs_error))
    return replace(
        worst,
        max_rel_error=max(part.max_rel_error for part in parts),
        beyond_tolerance=sum(part.beyond_tolerance for part in parts),
        flips=sum(part.flips for part in parts),
        unexplained_flips=sum(part.unexplained_flips for part in parts),
        seconds=sum(part.seconds for part in parts),
    )


def combined_row(parts: Sequence[Comparison], kind: str, place: str) -> dict[str, Any]:
    """Return one row for parity.json about all cases of a kind."""
    return {**asdict(combine(parts)), "inputs": kind, "place": place, "batches": len(parts)}


def is_different(row: Mapping[str, Any]) -> bool:
    return bool(row["beyond_tolerance"] or row["unexplained_flips"] or row.get("changed_metrics"))


def require_equal(rows: Sequence[Mapping[str, Any]], config: Export, why: str = "") -> None:
    """Raise for the first comparison that failed; `why` names the cause where it is known."""
    for row in rows:
        if is_different(row):
            changed = row.get("changed_metrics") or ()
            raise StageError(
                f"the ONNX file is not the model: at batch size {row['batch_size']}, {row['beyond_tolerance']} "
                f"elements differ beyond rtol={config.rtol}, atol={config.atol} of their spread (worst "
                f"{row['max_abs_error']:.3g} in {row['worst']}) and {row['unexplained_flips']} predictions flip "
                "without being ties" + "".join(f"; {sentence}" for sentence in (*changed, *([why] if why else [])))
            )


def distance(actual: Array, expected: Array) -> Array:
    """Return the absolute error; equal infinities, as in masked scores, count as zero."""
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error: Array = np.where(actual == expected, 0.0, np.abs(actual - expected))
    return error


def finite(value: float) -> float:
    """Replace infinity, which JSON cannot hold, by the largest double."""
    return float(np.nan_to_num(value, nan=np.finfo(np.float64).max))


def has_missing(feed: Mapping[str, Array]) -> bool:
    return any(array.dtype.kind == "f" and bool(np.isnan(array).any()) for array in feed.values())


def rows_with(condition: Callable[[Any], Any], arrays: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return for each row whether the condition holds for a float in one of the arrays."""
    rows = np.zeros(len(arrays[0]), dtype=bool)
    for array in arrays:
        if array.dtype.kind == "f":
            rows |= condition(array).reshape(len(array), -1).any(axis=1)
    return rows
