"""The samples the candidate does worst on, as a person would look at them: `worst.json`, of a bounded size.

They are kept when the data is at hand, so that the report needs neither it nor the user's code.

A sample that is laid out as a picture, as a small PNG: made here, so that a report needs neither data nor Pillow.
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
from pipeline.contract.task import FOLDER, HasText, Task
from pipeline.evaluate.predictions import ACTUAL, BASELINE, CANDIDATE, PREDICTED, Array, Columns
from pipeline.evaluate.results import Evidence

if TYPE_CHECKING:
    from pipeline.contract.task import Batch


SAMPLES = 12
_SHOWN = 4  # inputs of a sample, at most
_CHARACTERS = 600
_VALUES = 24

Read = Callable[["Batch"], Sequence[str]]


def worst_body(run: Run, task: Task, samples: Samples, evidence: Evidence, metric: str) -> dict[str, Any]:
    """worst.json"""
    metric = _per_sample(evidence, metric)
    indices = worst_indices(evidence.candidate, metric, SAMPLES)
    batch = samples.batch(indices)
    read, column, note = _reader(run, task, batch)
    texts = _texts(read, batch, len(indices)) if read else None
    names = [name for name in task.inputs if not column or batch[name].shape != batch[column].shape]  # no masks of it
    found = []
    for place, index in enumerate(indices):
        shown = [_described(name, batch[name][place].numpy()) for name in names]
        if texts is not None:  # numbers tell nothing beside it, a picture does
            shown = [
                _text(column or "text", texts[place]),
                *[one for one in shown if column or one["kind"] == "picture"],
            ]
        found.append({**_judged(evidence, index, metric), "shown": shown[:_SHOWN]})
    return {"metric": metric, "note": note, "samples": found}


def _per_sample(evidence: Evidence, metric: str) -> str:
    """The metric that decides, where samples have a value of it; else the task's first."""
    return metric if metric in evidence.candidate else next(iter(evidence.candidate))


def worst_indices(columns: Columns, metric: str, count: int) -> list[int]:
    """Lowest first; what is not a number is worst of all. Among equals the other metrics decide, then the order."""
    others = [columns[name] for name in sorted(columns, reverse=True) if name != metric]
    keys = [np.where(np.isnan(values), -math.inf, values) for values in (*others, columns[metric])]
    return [int(index) for index in np.lexsort(keys)[:count]]


def _judged(evidence: Evidence, index: int, metric: str) -> dict[str, Any]:
    baseline = evidence.baseline
    return {
        "index": index,
        "value": _finite(evidence.candidate[metric][index]),
        "baseline": None if baseline is None else _finite(baseline[metric][index]),
        "metrics": {name: _finite(values[index]) for name, values in sorted(evidence.candidate.items())},
        "actual": _answer(evidence, ACTUAL, index),
        "predicted": _answer(evidence, CANDIDATE + PREDICTED, index),
        "baseline_predicted": _answer(evidence, BASELINE + PREDICTED, index),
    }


def _answer(evidence: Evidence, column: str, index: int) -> str | None:
    """The name of a class, or the number of a task that predicts numbers."""
    if column not in evidence.columns:
        return None
    value = evidence.columns[column][index]
    return f"{float(value):.5g}" if evidence.classes is None else str(evidence.classes[int(value)])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _described(name: str, values: Array) -> dict[str, Any]:
    shape = list(values.shape)
    pixels = as_picture(values)
    if pixels is not None:
        return {"name": name, "kind": "picture", "shape": shape, "png": base64.b64encode(png(pixels)).decode()}
    first = [_finite(float(value)) for value in values.ravel()[:_VALUES]]
    return {"name": name, "kind": "values", "shape": shape, "values": first, "count": int(values.size)}


def _text(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "kind": "text", "text": text[:_CHARACTERS], "whole": len(text) <= _CHARACTERS}


def _texts(read: Read, batch: Batch, count: int) -> list[str]:
    """What the task makes of its samples is checked as all that users return."""
    found = read(batch)
    texts = isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(one, str) for one in found)
    if not texts or len(found) != count:
        raise DataError(f"text(): must return one text for each of the {count} samples of its batch")
    return list(found)


def _reader(run: Run, task: Task, batch: Batch) -> tuple[Read | None, str, str]:
    """Who turns samples into text, which input it reads, and what is to be said where nobody can."""
    if isinstance(task, HasText):
        return task.text, "", ""
    path, ids = run.output("prepare") / FOLDER / "tokenizer.json", _ids(task, batch)
    if ids is None or not path.is_file():
        return None, "", ""
    if importlib.util.find_spec("tokenizers") is None:
        return None, "", "tokens are shown by their numbers: the package tokenizers is not installed here"
    return _tokens_reader(path, ids), ids, ""


def _ids(task: Task, batch: Batch) -> str | None:
    """The input that holds tokens: whole numbers in a row, `input_ids` where there are several such."""
    rows = [name for name in task.inputs if batch[name].ndim == 2 and not batch[name].is_floating_point()]
    return next((name for name in rows if name == "input_ids"), rows[0] if rows else None)


def _tokens_reader(path: Path, ids: str) -> Read:
    from tokenizers import Tokenizer  # only tasks with a tokenizer have it

    tokenizer = Tokenizer.from_file(str(path))

    def read(batch: Batch) -> list[str]:
        mask = batch.get("attention_mask")
        seen = [row.tolist() for row in batch[ids]]
        if mask is not None and mask.shape == batch[ids].shape:
            seen = [row[kept != 0].tolist() for row, kept in zip(batch[ids], mask, strict=True)]
        return [tokenizer.decode(row, skip_special_tokens=True) for row in seen]

    return read


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
