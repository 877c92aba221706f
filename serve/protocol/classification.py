"""Triton's classification extension: the largest values of an output, as strings `value:index[:label]`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pipeline.contract.codec import Array
from pipeline.contract.signature import TensorSpec
from pipeline.system.errors import InvalidPayload

PARAMETER = "classification"
MAX_CLASSES = 1000  # of a row
_NO_NUMBERS = ("BOOL", "BYTES")


def parse_classification(value: Any, where: str) -> int:
    """Return the number of classes to return of an output; 0: none, but the tensor itself."""
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= MAX_CLASSES:
        text = f"{where}: {PARAMETER} {str(value)[:40]!r} is no whole number of classes from 0 to {MAX_CLASSES}"
        raise InvalidPayload(text)
    return value


def is_classifiable(spec: TensorSpec) -> bool:
    return spec.datatype not in _NO_NUMBERS


def has_rows(spec: TensorSpec) -> bool:
    """Return whether the output has a batch axis."""
    return bool(spec.shape) and isinstance(spec.shape[0], str)


def classes_spec(spec: TensorSpec) -> TensorSpec:
    """Describe what is returned instead of an output."""
    shape = (spec.shape[0], "classes") if has_rows(spec) else ("classes",)
    return spec.model_copy(update={"datatype": "BYTES", "shape": shape})


def check_classification(spec: TensorSpec) -> None:
    if not is_classifiable(spec):
        raise InvalidPayload(f"outputs: {spec.name}: {PARAMETER} needs numbers, and the output is {spec.datatype}")


def classify(array: Array, spec: TensorSpec, count: int) -> Array:
    """Return the largest values, of each row if the output has a batch axis; of equal ones the first."""
    rows = len(array) if has_rows(spec) else 1
    values = array.reshape(rows, math.prod(array.shape[1:] if has_rows(spec) else array.shape))
    size = values.shape[1]
    keys = np.where(np.isnan(values), -np.inf, values) if values.dtype.kind == "f" else values
    backwards = np.argsort(keys[:, ::-1], axis=1, kind="stable")[:, ::-1]  # stable: so that the first is last
    indices = size - 1 - backwards[:, :count]
    labels = spec.labels if len(spec.labels) == size else ()
    strings = np.empty(indices.shape, object)
    for (row, place), index in np.ndenumerate(indices):
        text = f"{values[row, index]!s}:{index}"  # as text numpy writes the shortest digits of the type
        strings[row, place] = f"{text}:{labels[index]}" if labels else text
    return strings if has_rows(spec) else strings[0]
