"""Displayable values of a sample as JSON of a bounded size, for `worst.json`.

Pictures become small PNG files, which are encoded here without Pillow.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from pipeline.contract.results import finite_or_none
from pipeline.contract.task import Boxes, Embedding, TaggedText
from pipeline.statistics.scores import Array
from pipeline.system.errors import DataError

Part: TypeAlias = dict[str, Any]  # one value with its `name` and `kind`
Range: TypeAlias = tuple[float, float]

_MAX_PARTS = 8  # of a sample
_MAX_CHARACTERS = 600
_MAX_VALUES = 24
_MAX_CURVE_POINTS = 200
_MAX_COLUMNS = 64
_MAX_CELL_CHARACTERS = 120
_MAX_WORDS = 150
_MAX_BOXES = 50
SHOWN_SIDE_PIXELS = 128  # of pictures that show() returns


def shown_parts(values: Mapping[str, Any]) -> list[Part]:
    """Return what show() returned for a sample; its pictures share one scale, so that they can be compared."""
    plain = {name: _as_array(value) for name, value in list(values.items())[:_MAX_PARTS]}
    scale = common_range(value.picture if isinstance(value, Boxes) else value for value in plain.values())
    return [_shown_part(name, value, scale) for name, value in plain.items()]


def _as_array(value: Any) -> Any:
    if isinstance(value, Boxes):
        return Boxes(_as_array(value.picture), np.asarray(_as_array(value.boxes)), value.labels, value.scores)
    if not isinstance(value, Tensor):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _shown_part(name: str, value: Any, scale: Range | None) -> Part:
    match value:
        case str() | bool():
            return text_part(name, str(value))
        case None | int() | float() | np.number():
            return {"name": name, "kind": "number", "value": None if value is None else _finite(float(value))}
        case Mapping():
            return row_part(name, value)
        case TaggedText():
            words, tags = value.words[:_MAX_WORDS], value.tags[:_MAX_WORDS]
            body = {"words": [str(word) for word in words], "tags": ["" if tag == "O" else str(tag) for tag in tags]}
            return {"name": name, "kind": "tags", **body, "whole": len(words) == len(value.words)}
        case Boxes():
            return _boxes_part(name, value, scale)
        case Embedding():
            return {**text_part(name, value.text), "kind": "neighbors", "neighbors": []}
        case np.ndarray() if value.ndim == 0:
            return _shown_part(name, value.item(), scale)
        case np.ndarray() if value.dtype.kind in "biuf":
            return array_part(name, value, scale, SHOWN_SIDE_PIXELS)
    raise DataError(
        f"show(): `{name}` is a {type(value).__name__}; return a text, a number, a mapping of columns to values, "
        "an array, or a TaggedText, Boxes or Embedding of `pipeline`"
    )


def text_part(name: str, text: str) -> Part:
    return {"name": name, "kind": "text", "text": text[:_MAX_CHARACTERS], "whole": len(text) <= _MAX_CHARACTERS}


def row_part(name: str, row: Mapping[str, Any]) -> Part:
    """Return a row of a table: its columns in order, with their values."""
    cells = [[str(column), _cell(value)] for column, value in list(row.items())[:_MAX_COLUMNS]]
    return {"name": name, "kind": "row", "row": cells, "whole": len(cells) == len(row)}


def _cell(value: Any) -> str | float | None:
    plain = _as_array(value)
    plain = plain.item() if isinstance(plain, np.generic | np.ndarray) and plain.size == 1 else plain
    if plain is None or (isinstance(plain, int | float) and not isinstance(plain, bool)):
        return None if plain is None else _finite(plain)
    return str(plain)[:_MAX_CELL_CHARACTERS]


def _finite(value: float) -> float | None:
    if isinstance(value, int | np.integer):
        return int(value)
    return finite_or_none(value)


def array_part(name: str, values: Array, scale: Range | None = None, side: int = 0, curves: bool = True) -> Part:
    """Return a picture, a curve, or the first values of an array of any other shape."""
    shape = list(values.shape)
    pixels = as_image(values, scale, side or MAX_SIDE_PIXELS)
    if pixels is not None:
        return {"name": name, "kind": "picture", "shape": shape, "png": base64.b64encode(png(pixels)).decode()}
    if curves and values.ndim == 1 and len(values) > 1:
        step = -(-len(values) // _MAX_CURVE_POINTS)
        return {"name": name, "kind": "curve", "shape": shape, "values": [_finite(float(v)) for v in values[::step]]}
    first_values = [_finite(float(value)) for value in values.ravel()[:_MAX_VALUES]]
    return {"name": name, "kind": "values", "shape": shape, "values": first_values, "count": int(values.size)}


def _boxes_part(name: str, value: Boxes, scale: Range | None) -> Part:
    """Return a picture with its boxes in fractions of its sides."""
    part = array_part(name, np.asarray(value.picture), scale, SHOWN_SIDE_PIXELS)
    rows = np.asarray(value.boxes, np.float64)
    image = _channels_last(np.asarray(value.picture))
    if image is None or (rows.size and (rows.ndim != 2 or rows.shape[1] != 4)):
        raise DataError(
            f"show(): `{name}` needs a picture of rows × columns, with or without 1 or 3 channels, and boxes of "
            f"4 numbers; found shapes {tuple(np.shape(value.picture))} and {tuple(rows.shape)}"
        )
    height, width = image.shape[:2]
    fractions = rows.reshape(-1, 4)[:_MAX_BOXES] / (width, height, width, height)
    boxes = [
        {
            "box": [_finite(edge) for edge in fractions[i].tolist()],
            "label": str(value.labels[i]) if len(value.labels) else "",
            "score": _finite(float(value.scores[i])) if len(value.scores) else None,
        }
        for i in range(len(fractions))
    ]
    return {**part, "kind": "boxes", "boxes": boxes, "whole": len(boxes) == len(rows.reshape(-1, 4))}


MAX_SIDE_PIXELS = 96  # larger images are downscaled by an integer factor
MIN_SIDE_PIXELS = 4  # smaller arrays are not images
_COLORS = {1: 0, 3: 2}  # channels → color type of PNG: greyscale, RGB
_OVERSHOOT = 0.1  # a model that computes values from 0 to 1 may leave that range by as much


def common_range(values: Iterable[Any]) -> Range | None:
    """Return the range of all pictures with fractions; None if there is no such picture."""
    floats = [value for value in values if isinstance(value, np.ndarray) and value.dtype.kind == "f"]
    pixels = [value[np.isfinite(value)] for value in floats if _channels_last(value) is not None]
    finite = [values for values in pixels if values.size]
    if not finite:
        return None
    low, high = min(float(values.min()) for values in finite), max(float(values.max()) for values in finite)
    return (0.0, 1.0) if low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT else (low, high)


def as_image(values: Array, scale: Range | None = None, side: int = MAX_SIDE_PIXELS) -> Array | None:
    """Return rows × columns × channels of bytes; None if the shape is not that of an image.

    `scale`: the values that become black and white, for values with fractions.
    """
    image = _channels_last(values)
    if image is None:
        return None
    reduced = _downscale(np.nan_to_num(image.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0), side)
    low, high = float(reduced.min()), float(reduced.max())
    if scale is not None and values.dtype.kind == "f":
        low, high = scale
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0  # already scaled
    elif values.dtype == np.uint8:
        low, high = 0.0, 255.0
    pixels: Array = ((reduced - low) / ((high - low) or 1.0) * 255).round().clip(0, 255).astype(np.uint8)
    return pixels


def png(pixels: Array) -> bytes:
    """Encode an image as PNG with one chunk of each kind."""
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    above = np.concatenate([np.zeros_like(pixels[:1]), pixels[:-1]])
    # Filter 2 stores the difference to the row above, which makes photographs smaller, but not drawings.
    rows = min((_filtered(0, pixels), _filtered(2, pixels - above)), key=len)
    body = _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _filtered(number: int, rows: Array) -> bytes:
    return zlib.compress(b"".join(bytes([number]) + row.tobytes() for row in np.ascontiguousarray(rows)), 9)


def _channels_last(values: Array) -> Array | None:
    """Return the array with channels last, or None."""
    if values.ndim == 2:
        image = values[:, :, None]
    elif values.ndim == 3 and values.shape[0] in _COLORS:
        image = np.moveaxis(values, 0, -1)
    elif values.ndim == 3 and values.shape[-1] in _COLORS:
        image = values
    else:
        return None
    return image if min(image.shape[:2]) >= MIN_SIDE_PIXELS else None


def _downscale(values: Array, side: int) -> Array:
    """Return an image whose pixels are means of squares; at the edges, of the rest of a square."""
    factor = -(-max(values.shape[:2]) // side)
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], factor)
        counts = np.diff(starts, append=values.shape[axis]).reshape([-1 if i == axis else 1 for i in range(3)])
        values = np.add.reduceat(values, starts, axis=axis) / counts
    return values


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
