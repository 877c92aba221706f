"""The codec as a part of what is judged: raw instances through decode, model and encode.

A codec that scales twice, swaps axes or reverses the labels makes every answer of the service wrong, while the model's
metrics, which are computed from the data's columns, stay as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.contract.codec import Array, Arrays, Codec, encode_method
from pipeline.contract.data import Samples, as_task_outputs, name_outputs
from pipeline.contract.run import describe
from pipeline.contract.task import (
    Batch,
    Generates,
    HasAnswer,
    HasAxes,
    HasExample,
    HasInstances,
    HasPredicted,
    HasText,
    Predictor,
    Task,
)
from pipeline.evaluate.answers import Field, both_ends, each_label_first, judge, read_outputs
from pipeline.evaluate.rules import GateRule
from pipeline.system.errors import InvalidPayload
from pipeline.system.files import TOKENIZER_FILE, tokenizer_ids

_SAMPLES = 64  # evenly spread over the test set
_ALONE = 8  # of them, also by themselves; all that a language model is checked on, whose outputs are large
_SEARCHED = 2048  # test samples in which example() is looked for, and whose texts are decoded
_MOST_LABELS = 1024  # that are made the likeliest in turn
_LARGEST = 1 << 25  # numbers in the outputs that are made for them
_TOLERANCE = 1e-3  # of a column's deviation, and of a number in a prediction
_ROUNDING = 10  # times as much for answers that are numbers: a codec may round them
_MIN_VALUES = 16  # of a sample, to recognise it with its axes swapped or scaled
_MAX_AXES = 4


@dataclass(frozen=True)
class CodecCheck:
    """What was found; `notes` are what could not be checked."""

    faults: tuple[str, ...]
    checked: tuple[str, ...]
    notes: tuple[str, ...] = ()
    decoded: int = 0  # test samples whose columns decode() was compared with
    encoded: int = 0  # test samples whose answers encode() was compared with
    fields: tuple[str, ...] = ()  # of an answer, which nothing explains

    @property
    def unproven(self) -> str:
        """Return what was not compared."""
        methods = {"decode()": self.decoded, "encode()": self.encoded or len(self.fields)}
        return ", ".join([*(name for name, count in methods.items() if not count), *self.fields])

    @property
    def summary(self) -> str:
        """Return what was compared with the test data, for the first line of the verdict."""
        if self.faults:
            return "the codec contradicts the test data or the model"
        counts = {"decode()": self.decoded, "encode()": self.encoded}
        if not any(counts.values()):
            return "the codec was not compared with the test data"
        compared = " and ".join(f"{name} on {count} samples" for name, count in counts.items() if count)
        unproven = f"; unproven: {self.unproven}" if self.unproven else ""
        return f"codec compared with the test data: {compared}{unproven}"

    def rule(self, answers: str = "any") -> GateRule:
        how = "decode() against the data's columns, each field of an answer against what the model returned"
        if self.faults:
            return GateRule("codec", False, "; ".join(self.faults), how=how, change="a corrected codec")
        if answers == "proven" and self.unproven:
            detail = f"unproven: {self.unproven}; evaluate.answers is proven"
            return GateRule(
                "codec", False, detail, how=how, change="instances(batch) and answer(prediction) in the task"
            )
        return GateRule("codec", True, "; ".join([*([self.summary] if self.unproven else []), *self.checked]), how=how)


@torch.inference_mode()
def check_codec(
    task: Task, codec: Codec, reference: str, samples: Samples, predict: Predictor, files: Path | None = None
) -> CodecCheck:
    """Compare the codec with the test data and the model; `files` is the folder that the codec shares with the task."""
    count = min(_ALONE if isinstance(task, Generates) else _SAMPLES, len(samples))
    last = count - 1 if samples.is_stream else len(samples) - 1  # a stream is read in order
    rows = np.unique(np.linspace(0, last, count).astype(np.int64))
    batch = samples.batch(rows)
    try:
        encode = _Encode(task, codec, reference, predict, files)
        faults = [*encode.faults(batch, samples)]
        decoded = _check_decode(task, codec, samples, batch, encode)
    except InvalidPayload as error:
        return CodecCheck((f"decode() refuses an instance of the task: {error}",), ())
    except InvalidCodec as error:
        return CodecCheck((str(error),), ())
    except Exception as error:  # the user's code may raise anything
        return CodecCheck((f"the codec raises {describe(error, Path.cwd())}",), ())
    checked = [f"encode() gives {len(rows)} test samples the same predictions alone and in company", *encode.checked]
    return replace(
        decoded,
        faults=(*faults, *decoded.faults),
        checked=(*checked, *decoded.checked),
        notes=(*decoded.notes, *encode.notes),
        encoded=encode.compared,
        fields=tuple(encode.unproven),
    )


class InvalidCodec(Exception):
    """What a codec returned cannot be compared."""


_NO_INSTANCES = "decode() is not compared with the data; to have it checked: add instances(batch) to the task"
_NO_ANSWER = (
    "nothing that the model returned explains {} in an answer; to have it compared: add predicted(outputs), with "
    "`classes` if it returns their numbers, or answer(prediction) to the task"
)


class _Encode:
    """The predictions for test samples, from the model's outputs on the data's own columns."""

    def __init__(self, task: Task, codec: Codec, reference: str, predict: Predictor, files: Path | None) -> None:
        self._task, self._predict = task, predict
        self._encode = encode_method(codec, reference)
        self._texts = _read_texts(files) if isinstance(task, Generates) else []
        self.checked: list[str] = []
        self.notes: list[str] = []
        self.compared = 0  # answers
        self.unproven: list[str] = []  # fields

    def faults(self, batch: Batch, samples: Samples) -> Iterator[str]:
        inputs = {name: batch[name].numpy() for name in self._task.inputs}
        outputs = _as_arrays(name_outputs(self._task, self._predict(batch)))
        count = len(next(iter(inputs.values())))
        predictions = self._encode(outputs, inputs)
        if reason := _not_plain(predictions):
            yield f"encode() must return a list of plain JSON values, one for each sample; {reason}"
            return
        if len(predictions) != count:
            yield f"encode() gives {len(predictions)} predictions for {count} samples"
            return
        for i in range(min(_ALONE, count)):
            alone = self._encode(_row(outputs, i), _row(inputs, i))
            if len(alone) != 1 or not _same(alone[0], predictions[i]):
                yield "encode() gives a sample another prediction alone than in company"
                break
        if wrong := self._wrong_answers(outputs, predictions):
            yield wrong
            return
        found = judge(predictions, read_outputs(self._task, outputs, inputs, self._texts))
        made = {each.name: each for each in self._judge_each_label(outputs, inputs, samples)}
        read = self._read_by_answer(predictions) - {each.name for each in found if each.meaning}
        fields = [made[each.name] if _is_worse(made.get(each.name), each) else each for each in found]
        fields += [each for name, each in made.items() if each.fault and name not in {field.name for field in found}]
        if wrong := "; ".join(each.fault for each in fields if each.fault and each.name not in read):
            yield f"encode() answers otherwise than the model: {wrong}"
            return
        names = {each.name: f"`{each.name}`" if each.name else "the answer" for each in fields}
        meanings = {name: "read by answer()" for name in names if name in read}
        meanings |= {each.name: each.meaning for each in fields if each.meaning}
        self.unproven = [text for name, text in names.items() if name not in meanings]
        self.notes += [_NO_ANSWER.format(", ".join(self.unproven))] if self.unproven else []
        self.compared = count if meanings else 0
        self.checked += [
            f"{names[name]} {'' if meaning.startswith(('rises', 'has')) else 'is '}{meaning}"
            for name, meaning in meanings.items()
        ]

    def _judge_each_label(self, outputs: Arrays, inputs: Arrays, samples: Samples) -> list[Field]:
        """Judge the answers for outputs in which each label in turn is the likeliest, also those that are rare."""
        task, labels = self._task, np.arange(0)
        if size := len(getattr(task, "classes", ())):
            labels = np.unique(np.linspace(0, size - 1, min(size, _MOST_LABELS)).astype(np.int64))
        elif self._texts:
            size = max(array.shape[-1] for array in outputs.values() if array.ndim == 3)
            outputs, inputs = self._end_of_one_text(outputs, inputs)
            numbers, labels = sum(array.size for array in outputs.values()), np.arange(size)
            if size * numbers > _LARGEST:
                batch = samples.batch(range(min(len(samples), _SEARCHED)))
                labels = np.unique(batch[token_input(task, batch) or task.inputs[0]].numpy())
                labels = labels[:: 1 + len(labels) * numbers // _LARGEST]
            labels = labels[(labels >= 0) & (labels < min(size, len(self._texts[0])))]
        if not len(labels) or not any(array.shape[-1] == size for array in outputs.values() if array.ndim > 1):
            return []
        labels = np.resize(labels, max(_SAMPLES, len(labels)))
        made = each_label_first(outputs, labels, size)
        inputs = {name: np.broadcast_to(array[0], (len(labels), *array.shape[1:])) for name, array in inputs.items()}
        tokens = labels if isinstance(task, Generates) else None
        try:
            answers = self._encode(made, inputs)
        except Exception as error:
            if len(outputs) == 1:
                raise
            # It may expect, for example, boxes that fit to the classes.
            self.notes.append(f"no label was made the likeliest: encode() then raises {describe(error, Path.cwd())}")
            return []
        if len({*labels.tolist()}) > 1 and all(_same(answer, answers[0]) for answer in answers):
            return [Field("", fault=f"it is the same for every label: {str(answers[0])[:80]}")]
        return judge(answers, read_outputs(task, made, inputs, self._texts, tokens))

    def _end_of_one_text(self, outputs: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """Return the first text's outputs, only those of its last position if encode() reads no others."""
        one, its = _row(outputs, 0), _row(inputs, 0)
        end = {name: array[:, -1:] if array.ndim == 3 else array for name, array in one.items()}
        with contextlib.suppress(Exception):  # it reads other positions
            if _same(self._encode(end, its)[0], self._encode(one, its)[0]):
                return end, its
        return one, its

    def _read_by_answer(self, predictions: Sequence[Any]) -> set[str]:
        """Return the fields whose change changes what the task's answer() reads."""
        task = self._task
        if not isinstance(task, HasAnswer) or not isinstance(task, HasPredicted):
            return set()
        if not isinstance(predictions[0], Mapping):
            return {""}
        read = set()
        for name in predictions[0]:
            others = [each for each in predictions if name in each and each[name] != predictions[0][name]]
            with contextlib.suppress(Exception):  # of answer(), which then reads the field as well
                for other in others[:1]:
                    read.add(name)
                    if _same(task.answer({**predictions[0], name: other[name]}), task.answer(predictions[0])):
                        read.discard(name)
        return read

    def depends_on_company(self, alone: Arrays, company: Arrays, index: int) -> bool:
        """Return True if encode() gives an instance another prediction where only padding was added.

        Where the model's own outputs depend on padding, the service computes instances of other lengths apart.
        """
        is_padded = any(np.shape(alone[name])[1:] != np.shape(company[name])[1:] for name in self._task.inputs)
        if not is_padded or not isinstance(self._task, HasAxes):
            return False  # instances of one length are compared above, on the data
        outputs, together = self._run(alone), self._run(company)
        if not all(_is_padded(outputs[name][0], together[name][index]) for name in outputs):
            return False
        own = self._encode(outputs, alone)
        return not _same(own[0], self._encode(together, company)[index])

    def _run(self, arrays: Arrays) -> Arrays:
        batch = {name: torch.from_numpy(np.asarray(arrays[name])) for name in self._task.inputs}
        return _as_arrays(name_outputs(self._task, self._predict(batch)))

    def _wrong_answers(self, outputs: Arrays, predictions: Sequence[Any]) -> str:
        """Compare what the task's answer() reads in predictions with predicted()."""
        task = self._task
        if not isinstance(task, HasPredicted) or not isinstance(task, HasAnswer):
            return ""
        tensors = {name: torch.from_numpy(array) for name, array in outputs.items()}
        expected = task.predicted(as_task_outputs(task, tensors)).detach().cpu().numpy()
        names = [str(name) for name in getattr(task, "classes", ())]
        answers = [task.answer(prediction) for prediction in predictions]
        numbers = [np.asarray(names.index(a) if isinstance(a, str) and a in names else a) for a in answers]
        scale = _ROUNDING * (float(np.std(expected)) or 1.0)
        wrong = [i for i, each in enumerate(numbers) if not _is_padded(each, np.asarray(expected[i]), scale)]
        if not wrong:
            self.checked.append(f"its answers are those of predicted() in {len(answers)} test samples")
            return ""
        right = expected[wrong[0]]
        return (
            f"encode() answers {len(wrong)} of {len(answers)} test samples otherwise than predicted(): "
            f"{str(predictions[wrong[0]])[:80]} for {str(right if right.ndim or not names else names[right])[:80]}"
        )


def _is_worse(made: Field | None, found: Field) -> bool:
    return made is not None and not found.fault and bool(made.fault or not made.meaning)


def token_input(task: Task, batch: Batch) -> str | None:
    """Return the input with token ids: rows of integers, `input_ids` if there are several."""
    rows = [name for name in task.inputs if batch[name].ndim == 2 and not batch[name].is_floating_point()]
    return next((name for name in rows if name == "input_ids"), rows[0] if rows else None)


def _read_texts(files: Path | None) -> list[list[str]]:
    """Return the texts of the tokens of a tokenizer.json: with and without those of special ones, and undecoded."""
    path = None if files is None else files / TOKENIZER_FILE
    if path is None or not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return []
    from tokenizers import Tokenizer  # needed only by tasks with a tokenizer

    tokenizer, tokens = Tokenizer.from_file(str(path)), range(1 + max(tokenizer_ids(path)))
    decoded = [
        tokenizer.decode_batch([[token] for token in tokens], skip_special_tokens=skip) for skip in (False, True)
    ]
    return [*decoded, [tokenizer.id_to_token(token) or "" for token in tokens]]


def _as_arrays(outputs: Mapping[str, Tensor]) -> dict[str, Array]:
    return {
        name: tensor.detach().float().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()
        for name, tensor in outputs.items()
    }


def _check_decode(task: Task, codec: Codec, samples: Samples, batch: Batch, encode: _Encode) -> CodecCheck:
    if isinstance(task, HasInstances):
        return _check_instances(task, codec, samples, batch, encode, task.instances)
    faults: list[str] = []
    instances = list(task.example()) if isinstance(task, HasExample) else []
    if instances:
        decoded = _decode(task, codec, instances)
        faults = _alone_faults(codec, instances, decoded, encode)
        found, altered = _find_in_data(task, decoded, samples)
        if found or altered:
            checked = f"decode() makes test samples of {found} of {len(instances)} instances of example()"
            return CodecCheck((*faults, *([altered] if altered else [])), (checked,) if found else (), decoded=found)
    if isinstance(task, HasText):  # which may be what a client sends
        with contextlib.suppress(Exception):
            texts = _check_instances(task, codec, samples, batch, encode, task.text)
            if not texts.faults:
                return replace(texts, faults=tuple(faults))
    note = "no instance of example() is a test sample; to have decode() checked: add instances(batch)"
    return CodecCheck(tuple(faults), (), (note if instances else _NO_INSTANCES,))


def _decode(task: Task, codec: Codec, instances: Sequence[Any]) -> Arrays:
    decoded = codec.decode(instances)
    if not isinstance(decoded, Mapping):
        raise InvalidCodec(f"decode() gives a {type(decoded).__name__}, not a mapping of input names to arrays")
    if missing := [name for name in task.inputs if name not in decoded]:
        raise InvalidCodec(f"decode() gives no array `{missing[0]}`, which the model takes")
    return decoded


def _not_plain(predictions: Any) -> str:
    """Return what JSON does not have; empty for a list of plain values."""
    if not isinstance(predictions, list | tuple):
        return f"found a {type(predictions).__name__}"
    try:
        json.dumps(predictions)
    except (TypeError, ValueError) as error:
        return f"{error}; to fix it: convert arrays and numbers of numpy by .tolist()"
    return ""


def _check_instances(
    task: Task, codec: Codec, samples: Samples, batch: Batch, encode: _Encode, make: Callable[[Batch], Sequence[Any]]
) -> CodecCheck:
    """Compare what decode() makes of the test samples with the data's columns: texts of many, which have rare words."""
    instances = list(make(batch))
    if all(isinstance(instance, str | None) for instance in instances) and not samples.is_stream:
        batch = samples.batch(range(min(len(samples), _SEARCHED)))
        instances = list(make(batch))
    columns = {name: batch[name].numpy() for name in task.inputs}
    if len(instances) != (count := len(next(iter(columns.values())))):
        return CodecCheck((f"instances(batch) returns {len(instances)} instances for {count} samples",), ())
    rows = [i for i, instance in enumerate(instances) if instance is not None]
    if not rows:
        return CodecCheck((), (), (f"instances(batch) returns None for all of {count} samples",))
    instances, columns = [instances[i] for i in rows], {name: column[rows] for name, column in columns.items()}
    decoded = _decode(task, codec, instances)
    faults = _alone_faults(codec, instances, decoded, encode)
    if isinstance(task, Generates):
        faults += _part_faults(task, codec, instances, columns)
    else:
        faults += _column_faults(task, decoded, columns)
    checked = f"decode() makes the data's columns of {len(rows)} raw test instances"
    return CodecCheck(tuple(faults), (checked,), decoded=len(rows))


def _alone_faults(codec: Codec, instances: Sequence[Any], decoded: Arrays, encode: _Encode) -> list[str]:
    """Decode instances one by one: what others are in the request must not matter, but for padding."""
    for i, instance in enumerate(instances[:_ALONE]):
        alone = codec.decode([instance])
        for name, array in decoded.items():
            if not _is_padded(np.asarray(alone[name])[0], np.asarray(array)[i]):
                return [f"decode() makes other values of an instance alone than in company (`{name}`)"]
        if encode.depends_on_company(alone, decoded, i):
            return ["encode() gives an instance another prediction alone than beside a longer one, by its padding"]
    return []


def _is_padded(alone: Array, company: Array, scale: float = 1.0) -> bool:
    """Return True if both are equal where the one by itself has values, at the start or at the end of each axis."""
    return any(_close(alone, company[part], scale) for part in both_ends(alone.shape, company.shape))


def _column_faults(task: Task, decoded: Arrays, columns: Arrays) -> list[str]:
    faults = []
    for name in task.inputs:
        array, column = np.asarray(decoded[name]), columns[name]
        is_equal = array.shape == column.shape and _close(array, column, _deviation(column))
        if not is_equal and not (isinstance(task, HasAxes) and _equals_without_padding(array, column)):
            shapes = "" if array.shape == column.shape else f", of shape {array.shape}, not {column.shape}"
            faults.append(f"decode() makes other values of raw test instances than column `{name}` has{shapes}")
    return faults


def _equals_without_padding(array: Array, column: Array) -> bool:
    """Return True if a column begins or ends with these values, and has one value in the rest of its last axis."""
    for part in both_ends(array.shape, column.shape):
        rest = np.delete(column[part[:-1]], part[-1], axis=-1)
        if len(np.unique(rest)) <= 1 and _close(array, column[part], _deviation(column)):
            return True
    return False


def _part_faults(task: Task, codec: Codec, instances: Sequence[Any], columns: Arrays) -> list[str]:
    """Look for the texts of a language model in the rows of the data, which are padded otherwise or hold several."""
    for i, instance in enumerate(instances):
        decoded = codec.decode([instance])
        part = {name: np.asarray(decoded[name])[0] for name in task.inputs}
        row = {name: columns[name][i] for name in task.inputs}
        if not any(_is_at(part, row, start) for start in range(len(row[task.inputs[0]]))):
            return [f"decode() makes values of a raw test instance that are not in its row ({', '.join(task.inputs)})"]
    return []


def _is_at(part: Arrays, row: Arrays, start: int) -> bool:
    slices = {name: row[name][start : start + len(values)] for name, values in part.items()}
    return all(slices[name].shape == part[name].shape and _close(slices[name], part[name], 1.0) for name in part)


def _find_in_data(task: Task, decoded: Arrays, samples: Samples) -> tuple[int, str]:
    """Return how many decoded instances are test samples, and a sentence if one is an altered test sample."""
    batch = samples.batch(range(min(len(samples), _SEARCHED)))
    arrays = {name: np.asarray(decoded[name]) for name in task.inputs}
    columns = {name: batch[name].numpy() for name in task.inputs}
    count = len(next(iter(arrays.values())))
    equal = [
        np.logical_and.reduce([_equal_rows(arrays[name][i], columns[name]) for name in task.inputs])
        for i in range(count)
    ]
    found = sum(bool(rows.any()) for rows in equal)
    if found == count:
        return found, ""
    for name in task.inputs:
        for i in (i for i in range(count) if not equal[i].any()):
            if altered := _describe_alteration(arrays[name][i], columns[name]):
                return found, f"decode() makes a test sample of example() with {altered} (`{name}`)"
    return found, ""


def _equal_rows(sample: Array, column: Array) -> Array:
    """Return for each row of the column whether it is this sample, which may lack its padding."""
    if sample.ndim != column.ndim - 1:
        return np.zeros(len(column), np.bool_)
    common = tuple(slice(0, min(a, b)) for a, b in zip(sample.shape, column.shape[1:], strict=True))
    tolerance = _TOLERANCE * _deviation(column)
    near = np.abs(column[(slice(None), *common)].astype(np.float64) - sample[common].astype(np.float64)) <= tolerance
    both_missing = np.isnan(column[(slice(None), *common)].astype(np.float64)) & np.isnan(sample[common].astype(float))
    rows: Array = (near | both_missing).reshape(len(column), -1).all(axis=1)
    return rows


def _describe_alteration(sample: Array, column: Array) -> str:
    """Return how a row of the column was altered to become this sample; empty if no row was."""
    if sample.size < _MIN_VALUES or not np.issubdtype(sample.dtype, np.floating) or sample.ndim > _MAX_AXES:
        return ""
    if sample.size != math.prod(column.shape[1:]) or not np.isfinite(sample).all() or np.ptp(sample) == 0:
        return ""
    if _equal_rows(sample, column).any():  # as a mask, which many samples share
        return ""
    for order in permutations(range(sample.ndim)):
        moved = sample.transpose(order)
        if moved.shape == column.shape[1:] and order != tuple(range(sample.ndim)) and _equal_rows(moved, column).any():
            return "its axes swapped"
    for axis in range(sample.ndim):
        if sample.shape[axis] > 1 and _equal_rows(np.flip(sample, axis), column).any():
            return "an axis reversed"
    return "other units" if sample.shape == column.shape[1:] and _is_linear_in_a_row(sample, column) else ""


def _is_linear_in_a_row(sample: Array, column: Array) -> bool:
    """Return True if the sample is a row of the column times a factor, plus a constant."""
    rows = column.reshape(len(column), -1).astype(np.float64)
    values = sample.reshape(-1).astype(np.float64)
    rows, values = rows - rows.mean(axis=1, keepdims=True), values - values.mean()
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.nan_to_num(rows @ values / norms)
    return bool(correlation.max(initial=0.0) > 1 - 1e-6)


def _close(a: Array, b: Array, scale: float) -> bool:
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        return bool((a == b).all())
    wide = (a.astype(np.float64), b.astype(np.float64))
    near = np.abs(wide[0] - wide[1]) <= _TOLERANCE * scale + 1e-5 * np.abs(wide[1])
    return bool((near | (np.isnan(wide[0]) & np.isnan(wide[1])) | (wide[0] == wide[1])).all())


def _deviation(column: Array) -> float:
    if column.dtype.kind in "biu":
        return 0.0
    deviation = float(np.nanstd(column.astype(np.float64))) if column.size else 0.0
    return deviation if math.isfinite(deviation) else 0.0


def _row(arrays: Arrays, index: int) -> dict[str, Array]:
    return {name: array[index : index + 1] for name, array in arrays.items()}


def _same(first: Any, second: Any) -> bool:
    """Compare two predictions; numbers may differ by rounding."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=_TOLERANCE, abs_tol=1e-5) or (
            math.isnan(first) and math.isnan(second)
        )
    return bool(first == second)
