"""Validation of arrays against a signature: names, shapes and sizes. Errors name the tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pipeline.contract.codec import Array
from pipeline.contract.signature import NUMPY_TYPES, Generation, Limits, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.errors import TooLarge
from serve.limits import MAX_SURPLUS

_ITEM_BYTES = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items()}

_MAX_SHOWN_AXES = 16  # in messages


def check_counts(inputs: int, outputs: int, signature: Signature) -> None:
    """Refuse many more inputs or outputs than the model has, before an object is made for each."""
    if inputs + outputs <= MAX_SURPLUS:
        return
    for name, count, specs in (("inputs", inputs, signature.inputs), ("outputs", outputs, signature.outputs)):
        if count > len(specs) + MAX_SURPLUS:
            raise InvalidPayload(f"{name}: {count} in one request; the model has {len(specs)}")


def check_names(names: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    """Check that each input is given exactly once."""
    expected = [spec.name for spec in specs]
    for name in names:
        if name not in expected:
            raise InvalidPayload(f"inputs: unknown input {name[:128]!r}; the model takes {_listed(expected)}")
        if names.count(name) > 1:
            raise InvalidPayload(f"inputs: {name!r} is given {names.count(name)} times")
    for name in expected:
        if name not in names:
            raise InvalidPayload(f"inputs: {name!r} is missing; the model takes {_listed(expected)}")


def check_outputs(names: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    outputs = [spec.name for spec in specs]
    for name in names:
        if name not in outputs:
            raise InvalidPayload(f"outputs: unknown output {name[:128]!r}; the model has {_listed(outputs)}")
        if names.count(name) > 1:
            raise InvalidPayload(f"outputs: {name!r} is requested {names.count(name)} times")


def check_shape(shape: Sequence[int], spec: TensorSpec, limits: Limits) -> None:
    """Check rank, fixed axes, batch size and limits of named axes."""
    if len(shape) != len(spec.shape) or any(
        isinstance(expected, int) and size != expected for size, expected in zip(shape, spec.shape, strict=True)
    ):
        raise InvalidPayload(f"{spec.name}: shape {format_shape(shape)} does not fit {format_shape(spec.shape)}")
    if spec.shape and isinstance(spec.shape[0], str):
        if shape[0] == 0:
            raise InvalidPayload(f"{spec.name}: the batch is empty")
        if shape[0] > limits.max_batch_size:
            raise InvalidPayload(f"{spec.name}: a batch of {shape[0]} exceeds the limit of {limits.max_batch_size}")
    for axis, size in zip(spec.shape, shape, strict=True) if limits.axes else ():
        if not isinstance(axis, str) or axis not in limits.axes:
            continue
        shortest, longest = limits.shortest.get(axis, 1), limits.axes[axis]
        if not shortest <= size <= longest:
            raise InvalidPayload(f"{spec.name}: axis {axis!r} is {size}; it may be {shortest} to {longest} long")


def check_arrays(arrays: Mapping[str, Array], signature: Signature) -> None:
    """Check names, types and shapes of arrays from a codec."""
    check_names(list(arrays), signature.inputs)
    for spec in signature.inputs:
        array = arrays[spec.name]
        if array.dtype != np.dtype(NUMPY_TYPES[spec.datatype]):
            raise InvalidPayload(f"{spec.name}: type {array.dtype} is not the model's {spec.datatype}")
    check_shapes({name: array.shape for name, array in arrays.items()}, signature)


def check_missing(arrays: Mapping[str, Array], signature: Signature) -> None:
    """Check that a codec turned null into NaN only where the model was trained with missing numbers."""
    for spec in signature.inputs:
        array = arrays[spec.name]
        if array.dtype.kind == "f" and not spec.allows_missing and np.isnan(array).any():
            problem = "holds null or NaN, but the model was trained without missing numbers here"
            raise InvalidPayload(f"{spec.name}: {problem}")


def check_shapes(shapes: Mapping[str, Sequence[int]], signature: Signature) -> None:
    """Check each shape, and that axes with the same name have the same size."""
    sizes: dict[str, tuple[int, str]] = {}
    for spec in signature.inputs:
        check_shape(shapes[spec.name], spec, signature.limits)
        _note_sizes(sizes, spec, shapes[spec.name])
    if signature.generation is not None:
        _check_past(sizes, signature.generation)


def check_bytes(shapes: Mapping[str, Sequence[int]], signature: Signature) -> None:
    """Check the size of the arrays before allocating them: one digit of JSON can become 8 bytes.

    An empty axis counts as 1, so that the other axes are limited as well.
    """
    sizes = {name: math.prod(max(axis, 1) for axis in shape) for name, shape in shapes.items()}
    total = sum(sizes[spec.name] * _ITEM_BYTES[spec.datatype] for spec in signature.inputs)
    if total > (most := signature.limits.max_body_bytes):
        raise TooLarge(f"inputs: tensors of {total} bytes are larger than the limit of {most} bytes")


def _note_sizes(sizes: dict[str, tuple[int, str]], spec: TensorSpec, shape: Sequence[int]) -> None:
    for axis, size in zip(spec.shape, shape, strict=True):
        if isinstance(axis, str):
            other, first = sizes.setdefault(axis, (size, spec.name))
            if size != other:
                raise InvalidPayload(f"{spec.name}: axis {axis!r} is {size}, but {other} in {first!r}")


def _check_past(sizes: Mapping[str, tuple[int, str]], generation: Generation) -> None:
    """Check that the attention mask covers the cached and the new positions."""
    axes = {name: sizes[name][0] for name in ("past", "sequence", "total") if name in sizes}
    if len(axes) == 3 and axes["past"] + axes["sequence"] != axes["total"]:
        raise InvalidPayload(
            f"{generation.mask}: covers {axes['total']} positions, but there are {axes['past']} in the past and "
            f"{axes['sequence']} new ones"
        )


def format_shape(shape: Sequence[int | str]) -> str:
    """Return a shape for messages, shortened if it is long."""
    more = ", …" if len(shape) > _MAX_SHOWN_AXES else ""
    return f"[{', '.join(str(axis) for axis in shape[:_MAX_SHOWN_AXES])}{more}]"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)
