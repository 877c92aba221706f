"""A request of the Open Inference Protocol, as REST and gRPC both give it, turned into the arrays the model takes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.spec.errors import InvalidPayload
from pipeline.spec.signature import NUMPY_TYPES, Signature
from serve.validate import check_arrays, check_names, check_outputs

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """One input as sent: its values as a list, or as raw little-endian bytes."""

    name: str
    datatype: str
    shape: Sequence[int]
    data: list[Any] | bytes


@dataclass(frozen=True)
class Wish:
    """One requested output."""

    name: str
    binary: bool


@dataclass(frozen=True)
class Request:
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Wish]  # none means all
    binary: bool = False  # how outputs are sent that were not requested by name
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)

    def arrays(self, signature: Signature) -> dict[str, Array]:
        """The inputs, held against the signature in full; a sentence naming the field where they do not fit."""
        check_names([tensor.name for tensor in self.inputs], signature.inputs)
        check_outputs([wish.name for wish in self.outputs], signature.outputs)
        specs = {spec.name: spec for spec in signature.inputs}
        arrays = {tensor.name: _array(tensor, specs[tensor.name].datatype) for tensor in self.inputs}
        check_arrays(arrays, signature)
        return arrays

    def wishes(self, signature: Signature) -> Sequence[Wish]:
        return self.outputs or [Wish(spec.name, self.binary) for spec in signature.outputs]


def to_raw(array: Array) -> bytes:
    """Row-major little-endian bytes; strings each behind its length."""
    if array.dtype != np.object_:
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    texts = (item if isinstance(item, bytes) else str(item).encode() for item in array.ravel())
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _array(tensor: Tensor, datatype: str) -> Array:
    if tensor.datatype != datatype:
        raise InvalidPayload(f"{tensor.name}: datatype {tensor.datatype!r} is not the model's {datatype}")
    convert: Callable[[Any, str], Array] = _from_raw if isinstance(tensor.data, bytes) else _from_list
    try:
        array = convert(tensor.data, datatype)
    except _Unfit as error:
        raise InvalidPayload(f"{tensor.name}: {error}") from None
    nested = array.ndim > 1 and list(array.shape) != list(tensor.shape)
    if nested or array.size != math.prod(tensor.shape):
        found = f"nested as {list(array.shape)}" if nested else f"with {array.size} elements"
        raise InvalidPayload(f"{tensor.name}: data {found} does not fill the shape {list(tensor.shape)}")
    return array.reshape(tuple(tensor.shape))


class _Unfit(Exception):
    """Data that is not of its datatype; the caller adds the tensor's name."""


def _from_list(data: list[Any], datatype: str) -> Array:
    """Strict: no numbers out of strings, no integers out of fractions, nothing that does not fit its type."""
    if datatype == "BYTES":
        return _texts(data)
    kind = np.dtype(NUMPY_TYPES[datatype])
    try:
        found = np.asarray(data)
    except (ValueError, OverflowError):
        raise _Unfit("data is not a regular array") from None
    if found.size == 0:
        return found.astype(kind)
    if found.dtype.kind not in {"b": "b", "f": "fiu"}.get(kind.kind, "iu"):
        raise _Unfit(f"data holds values that are not {datatype}")
    if kind.kind in "iu" and not (np.iinfo(kind).min <= int(found.min()) and int(found.max()) <= np.iinfo(kind).max):
        raise _Unfit(f"data holds a number outside the range of {datatype}")
    try:
        with np.errstate(over="raise"):
            return found.astype(kind)
    except FloatingPointError:
        raise _Unfit(f"data holds a number outside the range of {datatype}") from None


def _texts(data: list[Any]) -> Array:
    try:
        found = np.array(data, dtype=np.object_)
    except ValueError:
        raise _Unfit("data is not a regular array") from None
    if not all(isinstance(item, str) for item in found.ravel()):
        raise _Unfit("data holds values that are not strings")
    return found


def _from_raw(data: bytes, datatype: str) -> Array:
    if datatype == "BYTES":
        return np.array(_split(data), dtype=np.object_)
    kind = np.dtype(NUMPY_TYPES[datatype])
    if len(data) % kind.itemsize:
        raise _Unfit(f"{len(data)} raw bytes are no whole number of {datatype} elements")
    if datatype == "BOOL" and data.translate(None, b"\0\1"):
        raise _Unfit("raw BOOL data holds a byte other than 0 and 1")
    return np.frombuffer(data, dtype=kind.newbyteorder("<")).astype(kind, copy=False)


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
