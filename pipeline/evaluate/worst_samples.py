"""The samples with the worst scores of the candidate, ready to display: `worst.json`, of a bounded size.

They are stored during the evaluation, so that the report needs neither the data nor the user's code. Images are stored
as small PNG files, which are encoded here without Pillow.
"""

from __future__ import annotations

import base64
import importlib.util
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.contract.data import Samples
from pipeline.contract.errors import DataError
from pipeline.contract.run import Run
from pipeline.contract.statistics.scores import ACTUAL, BASELINE, CANDIDATE, PREDICTED, Array, Columns
from pipeline.contract.task import FOLDER, HasText, Task
from pipeline.evaluate.results import Results

if TYPE_CHECKING:
    from pipeline.contract.task import Batch


WORST_SAMPLES = 12
_MAX_INPUTS = 4  # of a sample
_MAX_CHARACTERS = 600
_MAX_VALUES = 24

ReadText = Callable[["Batch"], Sequence[str]]


def worst_body(run: Run, task: Task, samples: Samples, results: Results, metric: str) -> dict[str, Any]:
    """Return the content of worst.json."""
    metric = _sample_metric(results, metric)
    indices = worst_indices(results.candidate, metric, WORST_SAMPLES)
    batch = samples.batch(indices)
    read, column, note = _text_reader(run, task, batch)
    texts = _texts(read, batch, len(indices)) if read else None
    names = [name for name in task.inputs if not column or batch[name].shape != batch[column].shape]  # not its masks
    worst = []
    for row, index in enumerate(indices):
        parts = [_input_body(name, batch[name][row].numpy()) for name in names]
        if texts is not None:  # next to a text, images are useful and numbers are not
            parts = [
                _text_body(column or "text", texts[row]),
                *[part for part in parts if column or part["kind"] == "picture"],
            ]
        worst.append({**_sample_body(results, index, metric), "shown": parts[:_MAX_INPUTS]})
    return {"metric": metric, "note": note, "samples": worst}


def _sample_metric(results: Results, metric: str) -> str:
    """Return the decisive metric if it has a value per sample, else the first one of the task."""
    return metric if metric in results.candidate else next(iter(results.candidate))


def worst_indices(columns: Columns, metric: str, count: int) -> list[int]:
    """Return the indices with the lowest values, NaN first; the other metrics, then the order, break ties."""
    other_columns = [columns[name] for name in sorted(columns, reverse=True) if name != metric]
    keys = [np.where(np.isnan(values), -math.inf, values) for values in (*other_columns, columns[metric])]
    return [int(index) for index in np.lexsort(keys)[:count]]


def _sample_body(results: Results, index: int, metric: str) -> dict[str, Any]:
    baseline = results.baseline
    return {
        "index": index,
        "value": _finite(results.candidate[metric][index]),
        "baseline": None if baseline is None else _finite(baseline[metric][index]),
        "metrics": {name: _finite(values[index]) for name, values in sorted(results.candidate.items())},
        "actual": _answer(results, ACTUAL, index),
        "predicted": _answer(results, CANDIDATE + PREDICTED, index),
        "baseline_predicted": _answer(results, BASELINE + PREDICTED, index),
    }


def _answer(results: Results, column: str, index: int) -> str | None:
    """Return the name of a class, or the number of a regression task."""
    if column not in results.columns:
        return None
    value = results.columns[column][index]
    return f"{float(value):.5g}" if results.classes is None else str(results.classes[int(value)])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _input_body(name: str, values: Array) -> dict[str, Any]:
    shape = list(values.shape)
    pixels = as_image(values)
    if pixels is not None:
        return {"name": name, "kind": "picture", "shape": shape, "png": base64.b64encode(png(pixels)).decode()}
    first_values = [_finite(float(value)) for value in values.ravel()[:_MAX_VALUES]]
    return {"name": name, "kind": "values", "shape": shape, "values": first_values, "count": int(values.size)}


def _text_body(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "kind": "text", "text": text[:_MAX_CHARACTERS], "whole": len(text) <= _MAX_CHARACTERS}


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
    path, ids = run.output("prepare") / FOLDER / "tokenizer.json", _token_input(task, batch)
    if ids is None or not path.is_file():
        return None, "", ""
    if importlib.util.find_spec("tokenizers") is None:
        return None, "", "tokens are shown as numbers: the package tokenizers is not installed"
    return _token_decoder(path, ids), ids, ""


def _token_input(task: Task, batch: Batch) -> str | None:
    """Return the input with token ids: rows of integers, `input_ids` if there are several."""
    rows = [name for name in task.inputs if batch[name].ndim == 2 and not batch[name].is_floating_point()]
    return next((name for name in rows if name == "input_ids"), rows[0] if rows else None)


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


MAX_SIDE_PIXELS = 96  # larger images are downscaled by an integer factor
MIN_SIDE_PIXELS = 4  # smaller arrays are not images
_COLORS = {1: 0, 3: 2}  # channels → color type of PNG: greyscale, RGB


def as_image(values: Array) -> Array | None:
    """Return rows × columns × channels of bytes; None if the shape is not that of an image."""
    image = _channels_last(values)
    if image is None:
        return None
    reduced = _downscale(np.nan_to_num(image.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0))
    low, high = float(reduced.min()), float(reduced.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0  # already scaled
    elif values.dtype == np.uint8:
        low, high = 0.0, 255.0
    pixels: Array = ((reduced - low) / ((high - low) or 1.0) * 255).round().astype(np.uint8)
    return pixels


def png(pixels: Array) -> bytes:
    """Encode an image as PNG with one chunk of each kind."""
    height, width, channels = pixels.shape
    head = struct.pack(">IIBBBBB", width, height, 8, _COLORS[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))
    body = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


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


def _downscale(values: Array) -> Array:
    """Return an image whose pixels are means of squares; at the edges, of the rest of a square."""
    factor = -(-max(values.shape[:2]) // MAX_SIDE_PIXELS)
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], factor)
        counts = np.diff(starts, append=values.shape[axis]).reshape([-1 if i == axis else 1 for i in range(3)])
        values = np.add.reduceat(values, starts, axis=axis) / counts
    return values


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
