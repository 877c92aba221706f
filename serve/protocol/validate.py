"""Whether arrays are what the signature promises; every refusal is a sentence that names the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.contract.errors import InvalidPayload
from pipeline.contract.signature import NUMPY_TYPES, Generation, Limits, Signature, TensorSpec
from serve.errors import TooLarge

_ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items()}

Array = np.ndarray[Any, Any]
_MOST_AXES = 16  # in a sentence


def check_names(found: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    """Each input once, none missing, none unknown."""
    wanted = [spec.name for spec in specs]
    for name in found:
        if name not in wanted:
            raise InvalidPayload(f"inputs: unknown input {name[:128]!r}; the model takes {_listed(wanted)}")
        if found.count(name) > 1:
            raise InvalidPayload(f"inputs: {name!r} is given {found.count(name)} times")
    for name in wanted:
        if name not in found:
            raise InvalidPayload(f"inputs: {name!r} is missing; the model takes {_listed(wanted)}")


def check_outputs(wanted: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    known = [spec.name for spec in specs]
    for name in wanted:
        if name not in known:
            raise InvalidPayload(f"outputs: unknown output {name[:128]!r}; the model gives {_listed(known)}")
        if wanted.count(name) > 1:
            raise InvalidPayload(f"outputs: {name!r} is requested {wanted.count(name)} times")


def check_shape(shape: Sequence[int], spec: TensorSpec, limits: Limits) -> None:
    """Rank and fixed axes, and a batch that is neither empty nor too large."""
    if len(shape) != len(spec.shape) or any(
        isinstance(said, int) and found != said for found, said in zip(shape, spec.shape, strict=True)
    ):
        raise InvalidPayload(f"{spec.name}: shape {shown(shape)} does not fit {shown(spec.shape)}")
    if spec.shape and isinstance(spec.shape[0], str):
        if shape[0] == 0:
            raise InvalidPayload(f"{spec.name}: the batch is empty")
        if shape[0] > limits.max_batch_size:
            raise InvalidPayload(f"{spec.name}: a batch of {shape[0]} exceeds the limit of {limits.max_batch_size}")
    for axis, size in zip(spec.shape, shape, strict=True) if limits.axes else ():
        if isinstance(axis, str) and axis in limits.axes and not 0 < size <= limits.axes[axis]:
            raise InvalidPayload(f"{spec.name}: axis {axis!r} is {size}; it may be 1 to {limits.axes[axis]} long")


def check_arrays(arrays: Mapping[str, Array], signature: Signature) -> None:
    """Names, types and shapes of arrays that a codec made."""
    check_names(list(arrays), signature.inputs)
    for spec in signature.inputs:
        array = arrays[spec.name]
        if array.dtype != np.dtype(NUMPY_TYPES[spec.datatype]):
            raise InvalidPayload(f"{spec.name}: type {array.dtype} is not the model's {spec.datatype}")
    check_shapes({name: array.shape for name, array in arrays.items()}, signature)


def check_shapes(shapes: Mapping[str, Sequence[int]], signature: Signature) -> None:
    """Each by itself, and that axes of one name have one size across all inputs."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec in signature.inputs:
        check_shape(shapes[spec.name], spec, signature.limits)
        _note_sizes(sizes, spec, shapes[spec.name])
    if signature.generation is not None:
        _check_past(sizes, signature.generation)


def check_bytes(shapes: Mapping[str, Sequence[int]], signature: Signature) -> None:
    """What the arrays will take, before they are made: a number of 8 bytes may be written with one digit.

    An axis without elements counts as one: the others must be sizes that an array can have.
    """
    sizes = {name: math.prod(max(axis, 1) for axis in shape) for name, shape in shapes.items()}
    total = sum(sizes[spec.name] * _ITEM_BYTES[spec.datatype] for spec in signature.inputs)
    if total > (most := signature.limits.max_body_bytes):
        raise TooLarge(f"inputs: tensors of {total} bytes are larger than the limit of {most} bytes")


def _note_sizes(sizes: dict[str, tuple[int, str]], spec: TensorSpec, shape: Sequence[int]) -> None:
    for axis, size in zip(spec.shape, shape, strict=True):
        if isinstance(axis, str):
            known, first = sizes.setdefault(axis, (size, spec.name))
            if size != known:
                raise InvalidPayload(f"{spec.name}: axis {axis!r} is {size}, but {known} in {first!r}")


def _check_past(sizes: Mapping[str, tuple[int, str]], generation: Generation) -> None:
    """A mask says of every position, read before or new, whether it is one."""
    found = {name: sizes[name][0] for name in ("past", "sequence", "total") if name in sizes}
    if len(found) == 3 and found["past"] + found["sequence"] != found["total"]:
        raise InvalidPayload(
            f"{generation.mask}: says of {found['total']} positions, but there are {found['past']} in the past and "
            f"{found['sequence']} new ones"
        )


def shown(shape: Sequence[int | str]) -> str:
    """As people write it, and not longer than they read."""
    more = ", …" if len(shape) > _MOST_AXES else ""
    return f"[{', '.join(str(axis) for axis in shape[:_MOST_AXES])}{more}]"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
