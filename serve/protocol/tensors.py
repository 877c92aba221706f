"""A request of the Open Inference Protocol, as REST and gRPC both give it, turned into the arrays the model takes."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from pipeline.contract.errors import InvalidPayload
from pipeline.contract.signature import NUMPY_TYPES, Signature
from serve.protocol.validate import check_bytes, check_names, check_outputs, check_shapes, shown
from serve.runtime import bfloat16

Array: TypeAlias = np.ndarray[Any, Any]
Parameters: TypeAlias = Mapping[str, bool | int | float | str]

# What each kind of datatype may be written as in JSON. A bool is no number here, and 1.0 is no integer.
_WRITTEN: dict[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "f": frozenset({int, float}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "O": frozenset({str}),
}
_REFUSED = dict.fromkeys(
    ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    "send the tensor itself, as JSON or as raw bytes",
) | dict.fromkeys(
    ("sequence_id", "sequence_start", "sequence_end"),
    "nothing is remembered from one request to the next",
)
_REFUSED["classification"] = "ask for the tensor and take its largest values"
_MOST_SHAPES = 4096  # are kept
_FEW = 1024  # numbers; beyond it, what a call of numpy costs by itself is nothing
_KINDS = {name: np.dtype(kind) for name, kind in NUMPY_TYPES.items()}


class Tensor(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """One input as sent: its values as a list, as a flat array, or as raw little-endian bytes."""

    name: str
    datatype: str
    shape: Sequence[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    data: Any = None
    parameters: Parameters | None = None


class Wish(NamedTuple):
    """One requested output."""

    name: str
    binary: bool


class Request(NamedTuple):
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Wish]  # none means all
    binary: bool = False  # how outputs are sent that were not requested by name
    parameters: Parameters = MappingProxyType({})

    def arrays(self, signature: Signature) -> dict[str, Array]:
        """The inputs in the signature's order, held against it in full; a sentence where they do not fit."""
        specs, found = signature.input_specs, self.inputs
        given = {tensor.name: tensor for tensor in found}
        if len(given) != len(found) or given.keys() != specs.keys():
            check_names([tensor.name for tensor in found], signature.inputs)
        if self.outputs:
            check_outputs([wish.name for wish in self.outputs], signature.outputs)
        ordered = found if len(found) == 1 else [given[name] for name in specs]
        shapes = tuple([tuple(tensor.shape) for tensor in ordered])
        for tensor in ordered:
            if tensor.datatype != (wanted := specs[tensor.name].datatype):
                raise InvalidPayload(f"{tensor.name}: datatype {tensor.datatype[:40]!r} is not the model's {wanted}")
        if shapes not in signature.fitting:
            _check_fit(shapes, signature)
        return {tensor.name: _array(tensor, shape) for tensor, shape in zip(ordered, shapes, strict=True)}

    def wishes(self, signature: Signature) -> Sequence[Wish]:
        return self.outputs or [Wish(name, self.binary) for name in signature.output_names]


def refuse_parameters(parameters: Parameters, where: str) -> None:
    """What would change the answer and is not done here must not pass in silence; all else may be said."""
    for name, reason in _REFUSED.items():
        if parameters.get(name):
            raise InvalidPayload(f"{where}: parameter {name!r} is not supported: {reason}")


def to_raw(array: Array, datatype: str) -> bytes:
    """Row-major little-endian bytes; strings each behind its length."""
    if datatype == "BYTES":
        texts = (item if isinstance(item, bytes) else str(item).encode() for item in array.ravel())
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BF16":
        array = bfloat16.to_bits(array)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _check_fit(shapes: tuple[tuple[int, ...], ...], signature: Signature) -> None:
    """Once for all requests of these shapes."""
    named = dict(zip(signature.input_specs, shapes, strict=True))
    check_shapes(named, signature)
    check_bytes(named, signature)
    if len(signature.fitting) < _MOST_SHAPES:
        signature.fitting.add(shapes)


def _array(tensor: Tensor, shape: tuple[int, ...]) -> Array:
    """Of the datatype it names, which is the model's."""
    data, datatype = tensor.data, tensor.datatype
    nested: tuple[int, ...] | None = None
    try:
        if isinstance(data, list):
            found, nested = _from_list(data, datatype)
        elif isinstance(data, np.ndarray):
            found = _narrowed(data, datatype)
        else:
            found = _from_raw(data, datatype)
    except _Unfit as error:
        raise InvalidPayload(f"{tensor.name}: {error}") from None
    if nested is not None and len(nested) > 1 and nested != shape:
        raise InvalidPayload(f"{tensor.name}: data nested as {shown(nested)} does not fill the shape {shown(shape)}")
    if found.size != math.prod(shape):
        raise InvalidPayload(f"{tensor.name}: data with {found.size} elements does not fill the shape {shown(shape)}")
    return found.reshape(shape)


class _Unfit(Exception):
    """Data that is not of its datatype; the caller adds the tensor's name."""


def _from_list(data: list[Any], datatype: str) -> tuple[Array, tuple[int, ...]]:
    """The values and how they are nested. Types first: numpy would make numbers of strings, and room for the longest.

    Strict: no numbers out of strings or bools, no integers out of fractions, nothing that does not fit its type.
    """
    values, nested, types = _flat(data)
    kind = _KINDS[datatype]
    if not types <= _WRITTEN[kind.kind]:
        named = "strings" if datatype == "BYTES" else datatype
        raise _Unfit(f"data holds values that are not {named}")
    if kind.kind in "bO":
        return np.fromiter(values, kind, len(values)), nested
    if datatype == "FP32" and len(values) < _FEW:  # one call does what numpy needs several for, range check and all
        try:
            return np.frombuffer(struct.pack(f"<{len(values)}f", *values), "<f4"), nested
        except (OverflowError, struct.error):  # the second for whole numbers beyond the widest float
            raise _out_of_range(datatype) from None
    wide: Any = np.float64 if kind.kind == "f" else np.int64 if kind.kind == "i" else np.uint64
    try:
        return _narrowed(np.fromiter(values, wide, len(values)), datatype), nested
    except OverflowError:  # beyond the widest integer
        raise _out_of_range(datatype) from None


def _flat(data: list[Any]) -> tuple[list[Any], tuple[int, ...], set[type]]:
    nested = [len(data)]
    while list in (types := set(map(type, data))):
        sizes = set(map(len, data)) if len(types) == 1 else set()
        if len(sizes) != 1:
            raise _Unfit("data is not a regular array")
        nested.append(sizes.pop())
        data = list(itertools.chain.from_iterable(data))
    return data, tuple(nested), types


def _narrowed(found: Array, datatype: str) -> Array:
    """Numbers of a wide type as the datatype's own, where each fits it; a fraction goes to its nearest."""
    kind = _KINDS[datatype]
    if found.dtype.kind != kind.kind:
        raise _Unfit(f"data holds values that are not {datatype}")
    if kind.kind in "iu" and found.itemsize > kind.itemsize and found.size:
        limits = np.iinfo(kind)
        if found.min() < limits.min or found.max() > limits.max:
            raise _out_of_range(datatype)
    try:
        with np.errstate(over="raise"):
            narrow = found.astype(kind, copy=False)
    except FloatingPointError:
        raise _out_of_range(datatype) from None
    if datatype != "BF16":
        return narrow
    nearest = bfloat16.rounded(narrow)
    if (np.isinf(nearest) & np.isfinite(narrow)).any():
        raise _out_of_range(datatype)
    return nearest


def _out_of_range(datatype: str) -> _Unfit:
    return _Unfit(f"data holds a number outside the range of {datatype}")


def _from_raw(data: bytes | memoryview, datatype: str) -> Array:
    """Without a copy where the bytes lie as the machine wants them."""
    if datatype == "BYTES":
        texts = _split(bytes(data))
        return np.fromiter(texts, np.object_, len(texts))
    kind = np.dtype(np.uint16) if datatype == "BF16" else _KINDS[datatype]
    if len(data) % kind.itemsize:
        raise _Unfit(f"{len(data)} raw bytes are no whole number of {datatype} elements")
    if datatype == "BOOL" and len(data) and np.frombuffer(data, np.uint8).max() > 1:
        raise _Unfit("raw BOOL data holds a byte other than 0 and 1")
    found = np.frombuffer(data, kind.newbyteorder("<"))
    if datatype == "BF16":
        return bfloat16.widened(found)
    return found.astype(kind, copy=not found.flags.aligned)


def _split(data: bytes) -> list[str]:
    texts: list[str] = []
    place = 0
    while place < len(data):
        end = place + 4
        if end <= len(data):
            end += struct.unpack_from("<I", data, place)[0]
        if place + 4 > len(data) or end > len(data):
            raise _Unfit("raw BYTES data ends inside an element")
        try:
            texts.append(data[place + 4 : end].decode())
        except UnicodeDecodeError:
            raise _Unfit("raw BYTES data holds an element that is not UTF-8") from None
        place = end
    return texts
