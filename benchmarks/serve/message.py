"""A gRPC inference request as bytes, so that sending one needs no package that some contender disagrees with."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FRAME_BYTES = 5  # before a message in an HTTP/2 body


def infer_request(model: str, name: str, datatype: str, shape: Sequence[int], raw: bytes) -> bytes:
    """`ModelInferRequest` with one input whose values travel as raw bytes."""
    axes = b"".join(_varint(axis) for axis in shape)
    tensor = _field(1, name.encode()) + _field(2, datatype.encode()) + _field(3, axes)
    return _field(1, model.encode()) + _field(5, tensor) + _field(7, raw)


def framed(message: bytes) -> bytes:
    """Frame a gRPC message: flag for no compression, length, bytes."""
    return struct.pack(">BI", 0, len(message)) + message


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
