"""Requests of the Open Inference Protocol, from REST and gRPC, converted to the arrays of a model."""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Mapping, Sequence, Sized
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from pipeline.contract.codec import Array
from pipeline.contract.signature import NUMPY_TYPES, Signature
from pipeline.system.errors import InvalidPayload
from serve.limits import MAX_PARAMETERS
from serve.protocol.classification import PARAMETER, check_classification
from serve.protocol.validate import check_bytes, check_names, check_outputs, check_shapes, format_shape
from serve.runtime import bfloat16

Parameters: TypeAlias = Mapping[str, bool | int | float | str]

# JSON types accepted for each kind of datatype. A bool is not a number, and 1.0 is not an integer.
_JSON_TYPES: dict[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "f": frozenset({int, float}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "O": frozenset({str}),
}
_REJECTED_PARAMETERS = dict.fromkeys(
    ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    "send the tensor itself, as JSON or as raw bytes",
) | dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), "the service keeps no state between requests")
_REJECTED_PARAMETERS[PARAMETER] = "it is a parameter of a requested output"
_NULL = type(None)
_MAX_CACHED_SHAPES = 4096
_SMALL = 1024  # elements; with more, the overhead of numpy calls does not matter
_DTYPES = {name: np.dtype(kind) for name, kind in NUMPY_TYPES.items()}
_SWAPS_BYTES = sys.byteorder == "big"  # raw data is little-endian everywhere


class Tensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One input as received: a list, a flat array, raw little-endian bytes, or what makes one of these."""

    name: str
    datatype: str
    shape: Sequence[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    data: Any = None
    parameters: Parameters | None = None


class RequestedOutput(NamedTuple):
    """One requested output."""

    name: str
    binary: bool
    classes: int = 0  # that are returned instead of the tensor


class InferRequest(NamedTuple):
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[RequestedOutput]  # empty: all
    binary: bool = False  # encoding of outputs that are not requested by name
    parameters: Parameters = MappingProxyType({})

    def arrays(self, signature: Signature) -> dict[str, Array]:
        """Return the inputs in the signature's order; raises InvalidPayload where they do not match it."""
        specs, inputs = signature.input_specs, self.inputs
        by_name = {tensor.name: tensor for tensor in inputs}
        if len(by_name) != len(inputs) or by_name.keys() != specs.keys():
            check_names([tensor.name for tensor in inputs], signature.inputs)
        if self.outputs:
            check_outputs([output.name for output in self.outputs], signature.outputs)
            for output in self.outputs:
                if output.classes:
                    check_classification(next(spec for spec in signature.outputs if spec.name == output.name))
        ordered = inputs if len(inputs) == 1 else [by_name[name] for name in specs]
        shapes = tuple([tuple(tensor.shape) for tensor in ordered])
        for tensor in ordered:
            if tensor.datatype != (expected := specs[tensor.name].datatype):
                raise InvalidPayload(f"{tensor.name}: datatype {tensor.datatype[:40]!r} is not the model's {expected}")
        if shapes not in signature.validated_shapes:
            _check_shapes(shapes, signature)
        return {
            tensor.name: _array(tensor, shape, allows_missing=specs[tensor.name].allows_missing)
            for tensor, shape in zip(ordered, shapes, strict=True)
        }

    def requested_outputs(self, signature: Signature) -> Sequence[RequestedOutput]:
        return self.outputs or [RequestedOutput(name, self.binary) for name in signature.output_names]


def check_parameter_count(parameters: Sized, where: str) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidPayload(f"{where}: {len(parameters)} parameters; send at most {MAX_PARAMETERS}")


def reject_parameters(parameters: Parameters, where: str, supported: str = "") -> None:
    """Reject parameters that would change the answer but are not supported; ignore all others."""
    check_parameter_count(parameters, where)
    if parameters.keys().isdisjoint(_REJECTED_PARAMETERS):
        return
    for name, reason in _REJECTED_PARAMETERS.items():
        if parameters.get(name) and name != supported:
            raise InvalidPayload(f"{where}: parameter {name!r} is not supported: {reason}")


def to_raw(array: Array, datatype: str) -> bytes:
    """Return row-major little-endian bytes; each string follows its length."""
    if datatype == "BYTES":
        texts = (item if isinstance(item, bytes) else str(item).encode() for item in array.ravel())
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BF16":
        array = bfloat16.to_bits(array)
    return (array.byteswap() if _SWAPS_BYTES else array).tobytes()


def _check_shapes(shapes: tuple[tuple[int, ...], ...], signature: Signature) -> None:
    """Validate shapes once and remember them."""
    named = dict(zip(signature.input_specs, shapes, strict=True))
    check_shapes(named, signature)
    check_bytes(named, signature)
    if len(signature.validated_shapes) < _MAX_CACHED_SHAPES:
        signature.validated_shapes.add(shapes)


def _array(tensor: Tensor, shape: tuple[int, ...], *, allows_missing: bool) -> Array:
    """Return the array, with the shape and datatype of the tensor."""
    data, datatype = tensor.data() if callable(tensor.data) else tensor.data, tensor.datatype
    nested: tuple[int, ...] | None = None
    try:
        if isinstance(data, list):
            array, nested = _from_list(data, datatype, allows_missing=allows_missing)
        elif isinstance(data, np.ndarray):
            array = _narrow(data, datatype)
        else:
            array = _from_raw(data, datatype)
    except _InvalidData as error:
        raise InvalidPayload(f"{tensor.name}: {error}") from None
    if nested is not None and len(nested) > 1 and nested != shape:
        raise InvalidPayload(
            f"{tensor.name}: data nested as {format_shape(nested)} does not fill the shape {format_shape(shape)}"
        )
    if array.size != math.prod(shape):
        raise InvalidPayload(
            f"{tensor.name}: data with {array.size} elements does not fill the shape {format_shape(shape)}"
        )
    return array.reshape(shape)


class _InvalidData(Exception):
    """The data does not match its datatype; the caller adds the tensor's name."""


def _from_list(data: list[Any], datatype: str, *, allows_missing: bool) -> tuple[Array, tuple[int, ...]]:
    """Return the values and the shape of the nested list.

    Types are checked first and strictly, since numpy would convert strings to numbers: strings and bools are not
    numbers, fractions are not integers, and every number must be in range. A missing number, null, becomes NaN.
    """
    values, nested, types = _flatten(data)
    kind = _DTYPES[datatype]
    if _NULL in types and kind.kind == "f":
        if not allows_missing:
            raise _InvalidData("data holds null, but the model was trained without missing numbers here")
        values, types = [math.nan if value is None else value for value in values], types - {_NULL}
    if not types <= _JSON_TYPES[kind.kind]:
        expected = "strings" if datatype == "BYTES" else datatype
        raise _InvalidData(f"data holds values that are not {expected}")
    if kind.kind in "bO":
        return np.fromiter(values, kind, len(values)), nested
    if datatype == "FP32" and len(values) < _SMALL:  # one call replaces several of numpy, including the range check
        try:
            return np.frombuffer(struct.pack(f"<{len(values)}f", *values), "<f4"), nested
        except (OverflowError, struct.error):  # struct.error: integers beyond the range of float
            raise _out_of_range(datatype) from None
    wide: Any = np.float64 if kind.kind == "f" else np.int64 if kind.kind == "i" else np.uint64
    try:
        return _narrow(np.fromiter(values, wide, len(values)), datatype), nested
    except OverflowError:  # beyond 64 bits
        raise _out_of_range(datatype) from None


def _flatten(data: list[Any]) -> tuple[list[Any], tuple[int, ...], set[type]]:
    nested = [len(data)]
    while list in (types := set(map(type, data))):
        sizes = set(map(len, data)) if len(types) == 1 else set()
        if len(sizes) != 1:
            raise _InvalidData("data is not a regular array")
        nested.append(sizes.pop())
        data = list(itertools.chain.from_iterable(data))
    return data, tuple(nested), types


def _narrow(wide: Array, datatype: str) -> Array:
    """Convert 64-bit numbers to the datatype; raises if one is out of range. Fractions are rounded."""
    kind = _DTYPES[datatype]
    if wide.dtype.kind != kind.kind:
        raise _InvalidData(f"data holds values that are not {datatype}")
    if kind.kind in "iu" and wide.itemsize > kind.itemsize and wide.size:
        limits = np.iinfo(kind)
        if wide.min() < limits.min or wide.max() > limits.max:
            raise _out_of_range(datatype)
    try:
        with np.errstate(over="raise"):
            narrow = wide.astype(kind, copy=False)
    except FloatingPointError:
        raise _out_of_range(datatype) from None
    if datatype != "BF16":
        return narrow
    nearest = bfloat16.from_bits(bfloat16.to_bits(narrow))
    if (np.isinf(nearest) & np.isfinite(narrow)).any():
        raise _out_of_range(datatype)
    return nearest


def _out_of_range(datatype: str) -> _InvalidData:
    return _InvalidData(f"data holds a number outside the range of {datatype}")


def _from_raw(data: bytes | memoryview, datatype: str) -> Array:
    """Convert raw bytes, without a copy if they are aligned."""
    if datatype == "BYTES":
        texts = _split_strings(bytes(data))
        return np.fromiter(texts, np.object_, len(texts))
    kind = raw_type(datatype)
    if len(data) % kind.itemsize:
        raise _InvalidData(f"{len(data)} raw bytes are not a whole number of {datatype} elements")
    if datatype == "BOOL" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise _InvalidData("raw BOOL data holds a byte other than 0 and 1")
    array = np.frombuffer(data, kind)
    if _SWAPS_BYTES:
        array = array.byteswap()
    if datatype == "BF16":
        return bfloat16.from_bits(array)
    return array if array.flags.aligned else array.copy()


def raw_type(datatype: str) -> np.dtype[Any]:
    """Return the type of the elements in raw data."""
    return np.dtype(np.uint16) if datatype == "BF16" else _DTYPES[datatype]


def _split_strings(data: bytes) -> list[str]:
    texts: list[str] = []
    start = 0
    while start < len(data):
        end = start + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, start)[0]
        if start + 4 > len(data) or end > len(data):
            raise _InvalidData("raw BYTES data ends inside an element")
        try:
            texts.append(data[start + 4 : end].decode())
        except UnicodeDecodeError:
            raise _InvalidData("raw BYTES data holds an element that is not UTF-8") from None
        start = end
    return texts
