"""Training samples that activations get their ranges from, checked before a quantiser trips over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from export.axes import variants
from pipeline.spec.data import Samples, check_columns, open_split
from pipeline.spec.errors import DataError
from pipeline.spec.signature import NUMPY_TYPES, TensorSpec
from pipeline.spec.task import HasAxes, Task

Array = np.ndarray[Any, Any]

FEWEST = 16  # samples: the range of fewer is that of chance
_TOGETHER = 16  # in one run of the graph, whose every tensor is looked at
_MEND = "make data('train') give what data('test') gives, or leave int8-static out of export.variants"


def calibration(task: Task, specs: Sequence[TensorSpec], count: int) -> list[dict[str, Array]]:
    """Inputs of as many samples, spread evenly over the training split: data may be sorted by class."""
    samples = open_split(task, "train")
    check_columns(task, samples)
    taken = spread(len(samples), count)
    feeds = []
    for start in range(0, len(taken), _TOGETHER):
        batch = samples.batch(taken[start : start + _TOGETHER])
        feed = {spec.name: batch[spec.name].numpy() for spec in specs}
        for spec in specs:
            check_array(spec, feed[spec.name])
        feeds.append(feed)
    return feeds + [{spec.name: batch[spec.name].numpy() for spec in specs} for batch in _other_shapes(task, samples)]


def _other_shapes(task: Task, samples: Samples) -> Iterator[Mapping[str, Tensor]]:
    """Lengths and paddings the service will see as well: what they make of a tensor belongs to its range."""
    if isinstance(task, HasAxes):
        yield from (one.batch for one in variants(task, samples))


def spread(samples: int, count: int) -> list[int]:
    """Indices; all of them where there are not so many."""
    if min(samples, count) < FEWEST:
        raise DataError(
            f"calibration: {min(samples, count)} training samples are too few to learn ranges from; give {FEWEST} at "
            "least (data('train'), export.calibration_samples), or leave int8-static out of export.variants"
        )
    return [index * samples // count for index in range(count)] if samples > count else list(range(samples))


def check_array(spec: TensorSpec, array: Array) -> None:
    """The type and the shape the graph takes, and numbers that have a range."""
    wanted = np.dtype(NUMPY_TYPES[spec.datatype])
    if array.dtype != wanted:
        raise DataError(f"calibration: data('train') gives `{spec.name}` as {array.dtype}, the model takes {wanted}; {_MEND}")  # fmt: skip  # noqa: E501
    fixed = [(place, size) for place, size in enumerate(spec.shape) if isinstance(size, int)]
    if array.ndim != len(spec.shape) or any(array.shape[place] != size for place, size in fixed):
        raise DataError(
            f"calibration: data('train') gives `{spec.name}` of shape {list(array.shape)}, the model takes "
            f"{list(spec.shape)}; {_MEND}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"calibration: data('train') has NaN or infinity in `{spec.name}`, which has no range; {_MEND}")
