"""The largest difference from torch that counts as rounding, relative to the spread of each output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.codec import Array
from pipeline.contract.settings.stages import Export

_COLUMN_LIMIT = 0.01  # of a column's own spread: a column far smaller than the others must not be lost among them
_ROUNDING = 2.0**-17  # of the largest value of a column: 64 times the rounding of one float32
_CROSS_ROUNDING = 2.0**-22  # of the largest value of the whole output: columns may come from the same sums
_SMALLEST = 1e-37  # below it, processors may round to zero
_MIN_VALUES = 8  # of a column, to know its spread
_MASK, _MASK_RATIO = 1e3, 100.0  # masked scores are above this, and that far above all others


@dataclass(frozen=True)
class Scale:
    """The values of one output: of all, and of each of its columns if it has enough rows."""

    spread: float
    largest: float
    columns: Columns | None = None


@dataclass(frozen=True)
class Columns:
    """The mean, the standard deviation and the largest magnitude of each column, in the shape of one row."""

    center: Array
    spread: Array
    largest: Array


Scales = Mapping[str, Scale]


def measure_scales(outputs: Mapping[str, Array]) -> dict[str, Scale]:
    return {name: measure_scale(array) for name, array in outputs.items()}


def measure_scale(array: Array) -> Scale:
    """Measure an output of torch. Infinite and masked values do not count, unless a column has no others."""
    values = array.astype(np.float64)
    is_value = _unmasked(values)
    ordinary = values[is_value]
    if not ordinary.size:
        return Scale(1.0, 1.0)
    largest = float(np.abs(ordinary).max())
    spread = float(ordinary.std()) or largest or 1.0
    axis = 1 if array.ndim > 3 else array.ndim - 1
    others = tuple(index for index in range(array.ndim) if index != axis)
    if array.ndim < 2 or array.size // max(array.shape[axis], 1) < _MIN_VALUES:
        return Scale(spread, largest)
    is_used = is_value | (np.isfinite(values) & ~is_value.any(axis=others, keepdims=True))
    used = np.where(is_used, values, 0.0)
    counts = np.maximum(is_used.sum(axis=others, keepdims=True), 1)
    center = used.sum(axis=others, keepdims=True) / counts
    deviation = np.sqrt((np.where(is_used, values - center, 0.0) ** 2).sum(axis=others, keepdims=True) / counts)
    magnitude = np.abs(used).max(axis=others, keepdims=True)
    # A constant column has rounding errors of its magnitude; a column of zeros those of the others.
    column_spread = np.where(deviation > 0, deviation, np.where(magnitude > 0, magnitude, spread / _COLUMN_LIMIT))
    return Scale(spread, largest, Columns(center, column_spread, magnitude))


def _unmasked(values: Array) -> Array:
    """Return which values are finite and not masked: far beyond all others, as scores that may never win."""
    is_value: Array = np.isfinite(values)
    magnitudes = np.abs(values, where=is_value, out=np.zeros_like(values))
    is_large = is_value & (magnitudes >= _MASK)
    is_small = is_value & ~is_large
    if is_large.any() and is_small.any() and magnitudes[is_small].max() * _MASK_RATIO <= magnitudes[is_large].min():
        return is_small
    return is_value


def allowed_error(expected: Array, config: Export, scale: Scale | None = None) -> Array:
    """Return the largest rounding error of each value of torch's; `scale` is that of the test set, if known."""
    if expected.dtype.kind == "b":
        return np.zeros(expected.shape)
    values = np.abs(expected.astype(np.float64))
    if expected.dtype.kind in "iu":
        return np.minimum(config.rtol * values, 1.0)  # rounded to integers, where half a step is a step
    own = measure_scale(expected)
    scale = _larger(own, scale, expected.shape) if scale is not None else own
    rounding = max(_ROUNDING, 4 * float(np.finfo(expected.dtype).eps) if expected.dtype.itemsize < 4 else 0.0)
    cross = _CROSS_ROUNDING * rounding / _ROUNDING * scale.largest + _SMALLEST
    if scale.columns is None:
        return np.asarray(config.rtol * values + config.atol * scale.spread + rounding * scale.largest + cross)
    columns = scale.columns
    limit = np.minimum(config.atol * scale.spread, max(config.atol, _COLUMN_LIMIT) * columns.spread)
    deviation = np.abs(expected.astype(np.float64) - columns.center)
    return np.asarray(config.rtol * deviation + limit + rounding * columns.largest + cross)


def _larger(own: Scale, reference: Scale, shape: tuple[int, ...]) -> Scale:
    """Return the larger values of two scales; columns are those of the reference where they fit the shape."""
    spread, largest = max(own.spread, reference.spread), max(own.largest, reference.largest)
    first, second = own.columns, reference.columns
    if second is None or len(shape) != second.center.ndim or not _fits(second.center.shape, shape):
        return Scale(spread, largest, first)
    if first is None:
        return Scale(spread, largest, second)
    limits = Columns(second.center, np.maximum(first.spread, second.spread), np.maximum(first.largest, second.largest))
    return Scale(spread, largest, limits)


def _fits(row: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(size in (1, other) for size, other in zip(row, shape, strict=True))


def absolute_tolerance(config: Export, values: Iterable[Any]) -> float:
    """Return one limit for all values of an answer: export.atol, times the largest value if all are below 1."""
    finite = [np.abs(part[np.isfinite(part)]) for part in map(np.asarray, values) if part.dtype.kind == "f"]
    largest = max((float(part.max()) for part in finite if part.size), default=1.0)
    return config.atol * min(largest or 1.0, 1.0)


def is_within(actual: Array, expected: Array, allowed: Array) -> Array:
    """Return which values are equal within tolerance; infinity equals only itself, and NaN nothing."""
    left, right = actual.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        is_near = np.isfinite(left) & np.isfinite(right) & (np.abs(left - right) <= allowed)
        return np.asarray((actual == expected) | is_near)
