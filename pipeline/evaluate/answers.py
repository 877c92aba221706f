"""What each field of an answer is: explained by what the model returned, in contradiction to it, or unproven.

A field that is called `next[].token` has the values of `token` in a list of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import expit, softmax  # type: ignore[import-untyped]

from pipeline.contract.codec import Array, Arrays
from pipeline.contract.data import as_task_outputs
from pipeline.contract.task import Generates, HasPredicted, HasProbabilities, HasQuantiles, Task

_PREDICTED, _LABEL, _LABELS = "predicted()", "the predicted label", "the likeliest labels in order"
_ITS, _EACH = "its probability", "the probability of each label"
_PROBABILITY = frozenset({"probability", "probabilities", "prob", "probs", "confidence", "certainty", "likelihood"})
_LOW, _HIGH = frozenset({"low", "lower"}), frozenset({"high", "upper"})  # names of quantiles
_PLACES = 16  # of labels, the likeliest first
_PARTS = 64  # columns of an output that are compared
_MIN_VALUES = 8  # distinct ones, to see that a number rises with another, or was rounded
_LARGEST = 1 << 24  # numbers of an output that is compared
_EPSILON = 1e-5


@dataclass(frozen=True)
class Field:
    """A field of all answers; without a meaning it is unproven."""

    name: str
    meaning: str = ""
    fault: str = ""


class Labels:
    """The labels of each sample, the predicted one first, then by their scores; a label may have a name."""

    def __init__(self, predicted: Array, scores: Array | None, names: Sequence[str]) -> None:
        self.scores, self.names = scores, names
        self.size = len(names) if scores is None else scores.shape[1]
        self.order = predicted.astype(np.int64)[:, None]
        if scores is not None:
            places = min(_PLACES, self.size)
            likeliest = np.argpartition(-scores, places - 1, axis=1)[:, :places]
            likeliest = np.take_along_axis(likeliest, np.argsort(-_at(scores, likeliest), kind="stable"), axis=1)
            rows = zip(self.order, likeliest, strict=True)
            self.order = np.array([[*first, *row[row != first]][:places] for first, row in rows])

    def is_at(self, value: Any, sample: int, place: int) -> bool:
        """Return whether a value is the number or the name of the label in a place, or of one with an equal score."""
        label, scores = self.order[sample, place], None if self.scores is None else self.scores[sample]
        if scores is None:
            return self._is(value, label)
        tolerance = _EPSILON * (1 + abs(scores[label]))
        return any(self._is(value, i) and abs(scores[i] - scores[label]) <= tolerance for i in self.order[sample])

    def _is(self, value: Any, label: int) -> bool:
        return value.strip() == self.name(label).strip() if isinstance(value, str) else bool(value == label)

    def name(self, label: int) -> str:
        return self.names[label] if label < len(self.names) else str(label)

    def wrong(self, values: Sequence[Any], place: int = 0) -> list[int]:
        """Return the samples whose value is not the label in a place."""
        return [i for i, value in enumerate(values) if value is not None and not self.is_at(value, i, place)]

    def meaning(self, values: Sequence[Any]) -> str:
        """Return which label a field gives; empty if it does not give the one in one place."""
        known = [value for value in values if value is not None]
        if all(isinstance(value, list | tuple) and 0 < len(value) <= self.order.shape[1] for value in values):
            parts = [(i, place, each) for i, value in enumerate(values) for place, each in enumerate(value)]
            is_ordered = all(isinstance(each, str | int) and self.is_at(each, i, place) for i, place, each in parts)
            return _LABELS if is_ordered else ""
        kinds = (str, int, float)
        if not all(isinstance(value, kinds) and (self.size == 2 or not isinstance(value, bool)) for value in known):
            return ""
        places = range(self.order.shape[1])
        place = next((place for place in places if not self.wrong(values, place)), None)
        return "" if place is None else f"the label in place {place + 1}" if place else _LABEL


@dataclass
class Returned:
    """What the model returned for some samples, in the forms that an answer may have."""

    labels: list[Labels] = field(default_factory=list)
    numbers: list[tuple[str, Array]] = field(default_factory=list)  # what it is, and a row for each sample
    names: Sequence[str] = ()  # of the classes that predicted() has for each position, as in tags

    def add_labels(self, labels: Labels, probabilities: Array | None) -> None:
        self.labels.append(labels)
        if labels.scores is None:
            return
        if probabilities is None:
            probabilities = softmax(labels.scores.astype(np.float64), axis=1)
        ordered, parts = _at(probabilities, labels.order), range(min(labels.size, _PARTS))
        self.numbers += [
            (_ITS, ordered[:, 0]),
            (_EACH, probabilities),
            ("its score", _at(labels.scores, labels.order)[:, 0]),
        ]
        self.numbers += [(f"the probability of `{labels.name(i)}`", probabilities[:, i]) for i in parts]
        self.numbers.append(("the largest probabilities in order", ordered))
        if labels.size <= _PARTS:
            self.numbers.append(("1 for the predicted label", np.eye(labels.size)[labels.order[:, 0]]))
        self.numbers += [(f"the probability in place {i + 1}", ordered[:, i]) for i in range(1, ordered.shape[1])]

    def add_arrays(self, kind: str, arrays: Mapping[str, Array]) -> None:
        """Add outputs or inputs: as they are, as probabilities of yes, and the columns of their last axis."""
        for name, array in arrays.items():
            if array.size > _LARGEST or array.dtype.kind not in "biuf":
                continue
            self.numbers.append((f"{kind} `{name}`", array))
            if kind == "input" and array.ndim > 1:
                self.numbers.append((f"the length of `{name}`", np.count_nonzero(array, axis=1)))
            if array.dtype.kind == "f" and kind == "output":
                self.numbers.append((f"the sigmoid of output `{name}`", expit(array)))
            if array.ndim > 1 and array.shape[-1] <= _PARTS:
                parts = range(array.shape[-1])
                self.numbers += [(f"column {part} of {kind} `{name}`", array[..., part]) for part in parts]


def read_outputs(
    task: Task, outputs: Arrays, inputs: Arrays, texts: Sequence[Sequence[str]] = (), tokens: Array | None = None
) -> Returned:
    """Collect what the outputs say.

    `texts` are those of all tokens, in the ways that a codec may write them; `tokens` are the likeliest of outputs that
    were made for them.
    """
    returned = Returned(names=[str(name) for name in getattr(task, "classes", ())])
    tensors = as_task_outputs(task, {name: _as_tensor(array) for name, array in outputs.items()})
    predicted = tokens
    if tokens is None and isinstance(task, HasPredicted):
        predicted = task.predicted(tensors).detach().cpu().numpy()
    if isinstance(task, Generates):
        for logits in _last_scores(outputs, inputs):
            first, *others = texts or [[]]
            likeliest = logits.argmax(axis=1)
            if predicted is not None and predicted.shape == likeliest.shape and predicted.dtype.kind in "iu":
                likeliest = predicted
            returned.add_labels(Labels(likeliest, logits, first), None)
            returned.labels += [Labels(likeliest, logits, names) for names in others]
    elif returned.names and predicted is not None and predicted.ndim == 1 and predicted.dtype.kind in "iu":
        probabilities = task.probabilities(tensors).cpu().numpy() if isinstance(task, HasProbabilities) else None
        scores = _class_scores(outputs, len(returned.names)) if probabilities is None else probabilities
        returned.add_labels(Labels(predicted, scores, returned.names), probabilities)
    elif predicted is not None:
        returned.numbers.append((_PREDICTED, predicted))
    if isinstance(task, HasQuantiles):
        quantiles = task.predicted_quantiles(tensors).cpu().numpy()
        returned.numbers += [(f"quantile {level}", quantiles[..., i]) for i, level in enumerate(task.quantiles)]
    returned.add_arrays("output", outputs)
    returned.add_arrays("input", inputs)
    return returned


def _as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor, also of a row that is repeated, which numpy does not let write."""
    return torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array[:1].copy()).expand(array.shape)


def _class_scores(outputs: Arrays, count: int) -> Array | None:
    """Return the output with a number for each class; one number is that of the second of two classes."""
    floats = [array for array in outputs.values() if array.dtype.kind == "f"]
    found = next((array for array in floats if array.ndim == 2 and array.shape[1] == count), None)
    if found is not None or count != 2:
        return found
    single = next((array.reshape(-1) for array in floats if array.size == len(array)), None)
    return None if single is None else np.stack([np.zeros_like(single), single], axis=1)


def _last_scores(outputs: Arrays, inputs: Arrays) -> Iterator[Array]:
    """Yield the scores of the token after each text: at the last position, and at the last that is no padding."""
    found = [array for array in outputs.values() if array.ndim == 3 and array.dtype.kind == "f"]
    if not found:
        return
    logits = max(found, key=lambda array: array.shape[2])
    yield logits[:, -1]
    for mask in inputs.values():
        if mask.shape == logits.shape[:2] and mask.dtype.kind in "iu" and not (mask > 1).any():
            last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
            yield logits[np.arange(len(last)), last]


def judge(predictions: Sequence[Any], returned: Returned) -> list[Field]:
    """Judge every field of these predictions."""
    names = returned.labels[0].names if returned.labels else []
    columns = {name: _as_labels(values, returned) for name, values in _fields(predictions, names)}
    found = {name: _explain(name, values, returned) for name, values in columns.items()}
    meanings = {each.meaning for each in found.values()}
    is_stated, is_equal = bool(meanings & {_LABEL, _LABELS, _EACH}), any(each.endswith(_PREDICTED) for each in meanings)
    return [
        each if each.fault else replace(each, fault=_contradiction(each, columns[name], returned, is_stated, is_equal))
        for name, each in found.items()
    ]


def _as_labels(values: list[Any], returned: Returned) -> list[Any]:
    """Return names of classes as they are compared: tags of words as numbers; None for another word, as `unknown`."""
    numbers = {name: i for i, name in enumerate(returned.names)}
    if not numbers or not all(isinstance(value, str | list | tuple | None) for value in values):
        return values
    if not returned.labels and all(isinstance(value, list | tuple) for value in values):
        is_named = all(isinstance(each, str) and each in numbers for value in values for each in value)
        return [[numbers[each] for each in value] for value in values] if is_named else values
    known = [value if isinstance(value, str) and value in numbers else None for value in values]
    return known if 2 * sum(value is not None for value in known) > len(values) else values


def _fields(predictions: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the values of each field; None where a prediction lacks it."""
    if all(isinstance(each, Mapping) and (not names or set(map(str, each)) != set(names)) for each in predictions):
        for key in dict.fromkeys(key for each in predictions for key in each):
            for name, values in _fields([each.get(key) for each in predictions], names):
                yield f"{key}{'' if not name or name.startswith('[') else '.'}{name}", values
    elif all(isinstance(each, list | tuple) and each and isinstance(each[0], Mapping) for each in predictions):
        for key in dict.fromkeys(key for each in predictions for part in each for key in part):
            values = [[part.get(key) for part in each] for each in predictions]
            yield f"[].{key}", values
    elif names and all(isinstance(each, Mapping) for each in predictions):  # a value for each label
        rows = [{str(key): value for key, value in each.items()} for each in predictions]
        yield "", [[row[name] for name in names] for row in rows]
    else:
        yield "", list(predictions)


def _explain(name: str, values: list[Any], returned: Returned) -> Field:
    """Return what a field is, as far as the model's outputs explain it."""
    known = [i for i, value in enumerate(values) if value is not None]
    if not known:
        return Field(name, "never given")
    for labels in returned.labels:
        if meaning := labels.meaning(values):
            return Field(name, meaning)
    first, word = values[known[0]], _last_word(name)
    if isinstance(first, str | bool) and all(values[i] == first for i in known) and first not in returned.names:
        return Field(name, "the same in every answer")
    arrays = [array for i in known if (array := _as_array(values[i])) is not None]
    if len(arrays) < len(known):
        return Field(name)
    rounding = _rounding(arrays)
    for relation in ("", "rises with ", "has the direction of "):
        for meaning, rows in returned.numbers:
            if _is_related(relation, arrays, rows[known], rounding):
                fault = f"`{name}` is {meaning}" if _is_misnamed(word, meaning, returned) else ""
                return Field(name, relation + meaning, fault)
    return Field(name)


def _is_misnamed(word: str, meaning: str, returned: Returned) -> bool:
    """Return whether a field with this name must be something else, as the probability of the predicted label."""
    is_of_one = meaning.startswith("the probability of `")  # that of yes, in a question of yes or no
    if word in _PROBABILITY and (is_of_one or meaning.startswith("the probability in place")):
        return not (is_of_one and any(labels.size == 2 for labels in returned.labels))
    level = float(meaning.split()[1]) if meaning.startswith("quantile ") else 0.5
    return (level > 0.5 and word in _LOW) or (level < 0.5 and word in _HIGH)


def _last_word(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _contradiction(found: Field, values: list[Any], returned: Returned, is_stated: bool, is_equal: bool) -> str:
    """Return how a field contradicts the model; empty if it does not."""
    name = f"`{found.name}`" if found.name else "it"
    if found.meaning:
        is_other = found.meaning.startswith("the label in place") and not is_stated
        return f"{name} is {found.meaning}, and no field is the predicted label" if is_other else ""
    for labels in returned.labels:
        if wrong := _wrong_labels(values, labels, is_stated):
            example = f"{str(values[wrong[0]])[:40]} for {labels.name(labels.order[wrong[0], 0])}"
            return f"{name} is another label than the model's in {len(wrong)} of {len(values)} samples, as {example}"
    arrays = [array for value in values if (array := _as_array(value)) is not None]
    if len(arrays) < len(values):
        return ""
    word = _last_word(found.name)
    for meaning, rows in returned.numbers:
        is_its = meaning in (_ITS, _EACH) and word in _PROBABILITY
        is_its |= (meaning == _PREDICTED and not is_equal) or meaning.startswith(("quantile", f"output `{word}`"))
        rows = rows.reshape(len(rows), -1)
        in_order = [np.sort(array, axis=None) for array in arrays]
        if is_its and arrays[0].size > 1 and _is_related("", in_order, np.sort(rows), _rounding(arrays)):
            return f"{name} has the numbers of {meaning} in another order"
        if is_its and _is_related("rises with ", [-array.reshape(-1) for array in arrays], rows):
            return f"{name} falls where {meaning} rises, as {_short(values[0])} for {_short(rows[0])}"
    return ""


def _gives_labels(values: list[Any], labels: Labels, is_stated: bool) -> bool:
    """Return whether a field gives labels or their probabilities, right or wrong."""
    rows, known = _as_array(values), [value for value in values if value is not None]
    if rows is not None and rows.ndim == 2:
        return rows.shape[1] == labels.size and bool((rows >= 0).all() and (abs(rows.sum(axis=1) - 1) < 1e-2).all())
    if all(isinstance(value, str) for value in known):
        names = {name.strip() for name in labels.names}
        return all(value.strip() in names for value in known) and (len(names) < _PARTS or len({*known}) > 1)
    if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < labels.size for value in values):
        return False  # it counts something, or names labels by other numbers
    pairs = {*zip(labels.order[:, 0].tolist(), values, strict=True)}
    is_renamed = len(pairs) == len({label for label, _ in pairs}) == len({value for _, value in pairs}) > 1
    if is_renamed:
        return labels.size > 2 or not is_stated
    return not is_stated and 2 * len(labels.wrong(values)) < len(values)


def _wrong_labels(values: list[Any], labels: Labels, is_stated: bool) -> list[int]:
    """Return the samples in which a field gives another label than the model."""
    if all(isinstance(value, list | tuple) and value and isinstance(value[0], str) for value in values):
        wrong = labels.wrong([value[0] for value in values])
        return wrong if 4 * len(wrong) < len(values) else []  # else the predicted one is not the first of these lists
    if not _gives_labels(values, labels, is_stated):
        return []
    return labels.wrong([int(np.argmax(value)) if isinstance(value, list | tuple) else value for value in values])


def _short(value: Any) -> str:
    array = _as_array(value)
    return str(value if array is None else np.round(array.item() if array.size == 1 else array, 4))[:60]


def _as_array(value: Any) -> Array | None:
    """Return a number, or nested lists of equal lengths, as an array; None for everything else."""
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.dtype.kind in "biuf" else None


def _rounding(arrays: Sequence[Array]) -> float:
    """Return by how much the numbers may have been rounded, seen by their decimals."""
    values = np.unique(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.float64))
    places = next((n for n in range(-3, 7) if np.allclose(values, values.round(n), 1e-6, 0)), 9)
    is_seen = len(values) >= (_MIN_VALUES if places < 1 else 3)
    return 0.51 * 10.0**-places if is_seen else 1e-3


def _is_related(relation: str, arrays: Sequence[Array], rows: Array, rounding: float = 0.0) -> bool:
    """Return whether the numbers of a field are these, which may be padded at either end, or are related to them."""
    shape = rows.shape[1:]
    if rows[0].size == 1 and all(array.size == 1 for array in arrays):
        arrays, rows, shape = [array.reshape(1) for array in arrays], rows.reshape(-1, 1), (1,)
    places = [both_ends(array.shape, shape) for array in arrays]
    if not all(each and array.size for each, array in zip(places, arrays, strict=True)):
        return False
    starts, ends = ([row[each[end]] for each, row in zip(places, rows, strict=True)] for end in (0, -1))
    if relation.startswith("has"):
        return len(shape) == 1 < shape[0] and all(
            _cosine(a, row) > 1 - _EPSILON for a, row in zip(arrays, starts, strict=True)
        )
    a, *others = (
        np.concatenate([part.reshape(-1) for part in parts], dtype=np.float64) for parts in (arrays, starts, ends)
    )
    if relation:
        return any(_rises(a, b) for b in others)
    return any(np.allclose(a, b, 1e-4, rounding + 1e-6, equal_nan=True) for b in others)


def both_ends(shape: Sequence[int], whole: Sequence[int]) -> list[tuple[slice, ...]]:
    """Return the places of an array at the start and at the end of every axis of a larger one; empty if it is none."""
    if len(shape) != len(whole) or any(size > most for size, most in zip(shape, whole, strict=True)):
        return []
    ends = tuple(slice(most - size, most) for size, most in zip(shape, whole, strict=True))
    return [tuple(map(slice, shape)), ends]


def _rises(a: Array, b: Array) -> bool:
    """Return whether one number is never smaller where the other is larger."""
    if not np.isfinite([a, b]).all() or min(len(np.unique(a)), len(np.unique(b))) < _MIN_VALUES:
        return False
    ordered = a[np.lexsort((a, (b / (np.ptp(b) or 1)).round(6)))]
    return bool((np.diff(ordered) >= -_EPSILON * np.ptp(ordered)).all())


def _cosine(a: Array, b: Array) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def _at(rows: Array, columns: Array) -> Array:
    return np.take_along_axis(rows, columns, axis=1)


def each_label_first(outputs: Arrays, labels: Array, size: int) -> dict[str, Array]:
    """Return the first row for each label, which is the likeliest there, and the label after it the least likely."""
    rows = np.arange(len(labels))
    spread = 2.0 + rows % 13  # so that probabilities differ
    made = np.stack(
        [np.roll(np.linspace(0, width, size), label + 1) for label, width in zip(labels, spread, strict=True)]
    )
    changed = {}
    for name, array in outputs.items():
        changed[name] = np.broadcast_to(array[0], (len(labels), *array.shape[1:]))
        if array.ndim > 1 and array.shape[-1] == size and array.dtype.kind == "f":
            scores = softmax(made, axis=1) if np.allclose(array.sum(axis=-1), 1, 0, 1e-3) else made
            shape = (len(labels), *[1] * (array.ndim - 2), size)
            changed[name] = np.broadcast_to(scores.reshape(shape), changed[name].shape).astype(array.dtype)
    return changed
