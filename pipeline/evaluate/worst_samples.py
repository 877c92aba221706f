"""The candidate's worst samples, and a few typical ones, ready to display: `worst.json`, of a bounded size.

They are stored during the evaluation, so that the report needs neither the data nor the user's code. A task with `show`
decides what is displayed of a sample: else it is its text, or its inputs. Pictures become small PNG files, which are
encoded here without Pillow.
"""

from __future__ import annotations

import base64
import importlib.util
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.data import Samples
from pipeline.contract.results import finite_or_none
from pipeline.contract.run import Run
from pipeline.contract.task import SHARED_FOLDER, Batch, Boxes, Embedding, HasShow, HasText, Predictor, TaggedText, Task
from pipeline.evaluate.codec_check import token_input
from pipeline.evaluate.results import Results
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, LEVELS, PREDICTED, QUANTILES, Array, Columns
from pipeline.system.errors import DataError

WORST_SAMPLES = 12
TYPICAL_SAMPLES = 4  # of a forecast or a task with show()
_MAX_INPUTS = 4  # of a sample
_MAX_SEARCHED = 2000  # samples among which the nearest embeddings are searched
_NEIGHBORS = 5

ReadText = Callable[["Batch"], Sequence[str]]
Shown = Sequence[Mapping[str, Any]]  # what show() returned


def worst_body(
    run: Run, task: Task, samples: Samples, results: Results, metric: str, predict: Predictor
) -> dict[str, Any]:
    """Return the content of worst.json."""
    values = _sample_values(results)
    metric = metric if metric in values else next(iter(results.candidate))
    indices, note = worst_indices(values, metric, WORST_SAMPLES), ""
    is_forecast = results.columns.get(ACTUAL, np.empty(0)).ndim > 1
    if isinstance(task, HasShow) or is_forecast:
        indices += typical_indices(values, metric)
    if isinstance(task, HasShow):
        shown = _show(task, samples, indices, predict)
        parts = [shown_parts(row) for row in shown]
        _add_neighbors(parts, shown, indices, lambda others: _show(task, samples, others, predict), len(samples))
    else:
        parts, note = _inputs(run, task, samples.batch(indices), results.columns.get(ACTUAL, np.empty(0)), indices)
    if is_forecast:
        parts = [[*_forecast_parts(results.columns, index), *row] for index, row in zip(indices, parts, strict=True)]
    bodies = [{**_sample_body(results, index, metric), "shown": row} for index, row in zip(indices, parts, strict=True)]
    return {"metric": metric, "note": note, "samples": bodies[:WORST_SAMPLES], "typical": bodies[WORST_SAMPLES:]}


def _forecast_parts(columns: Columns, index: int) -> list[Part]:
    """Return the true values of a sample, the forecast, and the band between its outer quantiles."""
    names = {"actual": ACTUAL, "predicted": CANDIDATE + PREDICTED}
    parts = [array_part(name, columns[column][index]) for name, column in names.items()]
    if LEVELS in columns:
        name = f"quantiles {columns[LEVELS][0, 0]:g} to {columns[LEVELS][0, -1]:g}"
        low, high = (array_part(name, columns[CANDIDATE + QUANTILES][index, :, end]) for end in (0, -1))
        parts.append({**low, "upper": high["values"]})
    return parts


def _sample_values(results: Results) -> Columns:
    """Return the metrics that have a value per sample, where higher is better."""
    return {name: metric.slices[0] for name, metric in results.metrics.items() if metric.slices}


def worst_indices(columns: Columns, metric: str, count: int) -> list[int]:
    """Return the indices with the lowest values, NaN first; the other metrics, then the order, break ties."""
    other_columns = [columns[name] for name in sorted(columns, reverse=True) if name != metric]
    keys = [np.where(np.isnan(values), -math.inf, values) for values in (*other_columns, columns[metric])]
    return [int(index) for index in np.lexsort(keys)[:count]]


def typical_indices(columns: Columns, metric: str) -> list[int]:
    """Return the indices around the median that are not among the worst; few samples have none."""
    order = worst_indices(columns, metric, len(columns[metric]))
    start = max(len(order) // 2 - TYPICAL_SAMPLES // 2, WORST_SAMPLES)
    return order[start : start + TYPICAL_SAMPLES]


@torch.inference_mode()
def _show(task: HasShow, samples: Samples, indices: Sequence[int], predict: Predictor) -> Shown:
    batch = samples.batch(indices)
    shown = task.show(batch, predict(batch))
    is_list = isinstance(shown, Sequence) and not isinstance(shown, str)
    if not is_list or len(shown) != len(indices) or not all(isinstance(row, Mapping) for row in shown):
        raise DataError(f"show(): must return one mapping of names to values for each of the {len(indices)} samples")
    return shown


def _add_neighbors(
    parts: Sequence[Sequence[Part]],
    shown: Shown,
    indices: Sequence[int],
    show: Callable[[Sequence[int]], Shown],
    count: int,
) -> None:
    """Add to each embedding its nearest ones: samples spread evenly over the test set, and the worst samples."""
    if not any(isinstance(value, Embedding) for row in shown for value in row.values()):
        return
    searched = sorted({*indices, *np.linspace(0, count - 1, min(count, _MAX_SEARCHED)).astype(int).tolist()})
    rows = [row for start in range(0, len(searched), 256) for row in show(searched[start : start + 256])]
    for row_parts, values, index in zip(parts, shown, indices, strict=True):
        for part in row_parts:
            value = values.get(part["name"])
            if isinstance(value, Embedding):
                part["neighbors"] = _nearest(value, part["name"], index, searched, rows)


def _nearest(value: Embedding, name: str, index: int, searched: Sequence[int], rows: Shown) -> list[dict[str, Any]]:
    """Return the nearest embeddings, each text once; `own` marks the sample's own one of another name."""
    others = [(i, row.get(value.among or name)) for i, row in zip(searched, rows, strict=True)]
    is_same = value.among in ("", name)
    candidates = [
        (i, other)
        for i, other in others
        if isinstance(other, Embedding) and not (is_same and (i == index or other.text == value.text))
    ]
    if not candidates and is_same:
        return []
    if not candidates:
        raise DataError(f"show(): `{name}` is searched among `{value.among}`, which no other sample shows")
    vectors = np.stack([_unit_vector(other.vector) for _, other in candidates])
    scores = vectors @ _unit_vector(value.vector)
    own_text = next((other.text for i, other in candidates if i == index), None)
    nearest: dict[str, float] = {}
    for place in np.argsort(-scores, kind="stable"):
        nearest.setdefault(candidates[int(place)][1].text, float(scores[place]))
        if len(nearest) == _NEIGHBORS:
            break
    return [{**text_part("", text), "score": score, "own": text == own_text} for text, score in nearest.items()]


def _unit_vector(vector: Any) -> Array:
    values: Array = np.nan_to_num(np.asarray(vector, dtype=np.float64).ravel())
    return values / (np.linalg.norm(values) or 1.0)


def _inputs(run: Run, task: Task, batch: Batch, actual: Array, indices: Sequence[int]) -> tuple[list[list[Part]], str]:
    """Return the displayable inputs of each sample of a task without show(), and a note on what is missing."""
    read, column, note = _text_reader(run, task, batch)
    texts = _texts(read, batch, len(indices)) if read else None
    names = [name for name in task.inputs if not column or batch[name].shape != batch[column].shape]  # not its masks
    scalars = [name for name in _scalar_columns(batch) if not _is_actual(batch[name].numpy(), actual, indices)]
    parts = []
    for row in range(len(indices)):
        inputs = [array_part(name, batch[name][row].numpy(), curves=False) for name in names if name not in scalars]
        if texts is not None:  # next to a text, images are useful and numbers are not
            kept = [part for part in inputs if column or part["kind"] == "picture"]
            parts.append([text_part(column or "text", texts[row]), *kept][:_MAX_INPUTS])
        else:
            named = [row_part("columns", {name: batch[name][row] for name in scalars})] if scalars else []
            parts.append([*named, *inputs][:_MAX_INPUTS])
    if not note and any(part["kind"] == "values" for row_parts in parts for part in row_parts):
        note = "Inputs are shown as the model gets them; with show() the task displays original values."
    return parts, note


def _scalar_columns(batch: Batch) -> list[str]:
    """Return the columns with one number per sample, which are displayed by name."""
    return [name for name, column in batch.items() if column.numel() == len(column)]


def _is_actual(column: Array, actual: Array, indices: Sequence[int]) -> bool:
    """Return whether a column is what actual() returns, which is displayed beside the prediction."""
    return len(actual) > 0 and bool(np.array_equal(column.ravel(), actual[list(indices)]))


def _sample_body(results: Results, index: int, metric: str) -> dict[str, Any]:
    values, compared = results.candidate.get(metric), (results.baseline or {}).get(metric)
    return {
        "index": index,
        "value": None if values is None else finite_or_none(values[index]),
        "baseline": None if compared is None else finite_or_none(compared[index]),
        "metrics": {name: finite_or_none(column[index]) for name, column in sorted(results.candidate.items())},
        "actual": _answer(results, ACTUAL, index),
        "predicted": _answer(results, CANDIDATE + PREDICTED, index),
        "baseline_predicted": _answer(results, BASELINE + PREDICTED, index),
    }


def _answer(results: Results, column: str, index: int) -> str | None:
    """Return the name of a class, or the number of a regression task; forecasts are drawn."""
    if column not in results.columns or results.columns[column].ndim > 1:
        return None
    value = results.columns[column][index]
    return f"{float(value):.5g}" if results.classes is None else str(results.classes[int(value)])


def _texts(read: ReadText, batch: Batch, count: int) -> list[str]:
    texts = read(batch)
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise DataError(f"text(): must return one string for each of the {count} samples of its batch")
    return list(texts)


def _text_reader(run: Run, task: Task, batch: Batch) -> tuple[ReadText | None, str, str]:
    """Return a function from samples to texts, the input it reads, and a note if there is no such function."""
    if isinstance(task, HasText):
        return task.text, "", ""
    path, ids = run.output("prepare") / SHARED_FOLDER / "tokenizer.json", token_input(task, batch)
    if ids is None or not path.is_file():
        return None, "", ""
    if importlib.util.find_spec("tokenizers") is None:
        return None, "", "tokens are shown as numbers: the package tokenizers is not installed"
    return _token_decoder(path, ids), ids, ""


def _token_decoder(path: Path, ids: str) -> ReadText:
    from tokenizers import Tokenizer  # needed only by tasks with a tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def read(batch: Batch) -> list[str]:
        mask = batch.get("attention_mask")
        token_lists = [row.tolist() for row in batch[ids]]
        if mask is not None and mask.shape == batch[ids].shape:
            token_lists = [row[row_mask != 0].tolist() for row, row_mask in zip(batch[ids], mask, strict=True)]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in token_lists]

    return read


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
