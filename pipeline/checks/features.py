"""What is looked at of a column: its own numbers while they are few, a few sums of each sample where they are many."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

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
