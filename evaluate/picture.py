"""A sample that is laid out as a picture, as a small PNG: made here, so that a report needs neither data nor Pillow."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from evaluate.columns import Array

LARGEST = 96  # pixels of a side; a larger picture is shrunk by whole factors
_FEWEST = 4  # pixels of a side, below which nobody would call it one
_COLORS = {1: 0, 3: 2}  # channels → PNG's own number for grey and for red, green, blue


def as_picture(values: Array) -> Array | None:
    """Rows × columns × channels of bytes; None where the shape is that of no picture."""
    laid = _laid_out(values)
    if laid is None:
        return None
    small = _shrunk(np.nan_to_num(laid.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0))
    low, high = float(small.min()), float(small.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0  # grey values already
    elif values.dtype == np.uint8:
        low, high = 0.0, 255.0
    scaled: Array = ((small - low) / ((high - low) or 1.0) * 255).round().astype(np.uint8)
    return scaled


def png(pixels: Array) -> bytes:
    """W3C's Portable Network Graphics, one chunk of each kind."""
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))
    body = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _laid_out(values: Array) -> Array | None:
    """Channels last, whichever way the model takes them."""
    if values.ndim == 2:
        laid = values[:, :, None]
    elif values.ndim == 3 and values.shape[0] in _COLORS:
        laid = np.moveaxis(values, 0, -1)
    elif values.ndim == 3 and values.shape[-1] in _COLORS:
        laid = values
    else:
        return None
    return laid if min(laid.shape[:2]) >= _FEWEST else None


def _shrunk(values: Array) -> Array:
    """Each pixel the mean of a square; those at the edge of what is left."""
    factor = -(-max(values.shape[:2]) // LARGEST)
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], factor)
        counts = np.diff(starts, append=values.shape[axis]).reshape([-1 if one == axis else 1 for one in range(3)])
        values = np.add.reduceat(values, starts, axis=axis) / counts
    return values


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
