"""The candidate's worst samples, and a few typical ones, ready to display: `worst.json`, of a bounded size.

They are stored during the evaluation, so that the report needs neither the data nor the user's code. A task with `show`
decides what is displayed of a sample: else it is its text, or its inputs.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.contract.data import Samples
from pipeline.contract.results import finite_or_none
from pipeline.contract.run import Run
from pipeline.contract.task import SHARED_FOLDER, Embedding, HasShow, HasText, Task
from pipeline.evaluate.codec_check import token_input
from pipeline.evaluate.results import Results
from pipeline.evaluate.sample_parts import Part, array_part, row_part, shown_parts, text_part
from pipeline.statistics.scores import ACTUAL, BASELINE, CANDIDATE, LEVELS, PREDICTED, QUANTILES, Array, Columns
from pipeline.system.errors import DataError

if TYPE_CHECKING:
    from pipeline.contract.task import Batch, Predictor


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
