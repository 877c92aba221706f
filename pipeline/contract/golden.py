"""Golden requests: requests of the export with their answers, which every service of the bundle must repeat.

They are arrays for the raw protocol, instances for the codec, and prompts for a language model. The second half of this
file decodes greedily over a bundle's graph in the simplest way, as the reference for faster implementations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.contract.signature import NUMPY_TYPES, Generation, TensorSpec
from pipeline.system.files import read_object, write_json

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Golden:
    """Arrays by name for the raw protocol; instances and predictions for the codec (both may be empty)."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    instances: list[Any]
    predictions: list[Any]
    rtol: float
    atol: float
    # Language models: ids of prompts and greedy answers, up to the first token that is nearly a tie.
    generated: list[dict[str, list[int]]] = field(default_factory=list)

    def write(self, directory: Path) -> None:
        arrays = {f"input.{name}": array for name, array in self.inputs.items()}
        arrays |= {f"output.{name}": array for name, array in self.outputs.items()}
        np.savez(
            directory / "golden.npz",
            allow_pickle=False,
            **{name: _without_objects(array) for name, array in arrays.items()},
        )
        body = {"rtol": self.rtol, "atol": self.atol, "instances": self.instances, "predictions": self.predictions} | (
            {"generated": self.generated} if self.generated else {}
        )
        write_json(directory / "golden.json", body)

    @classmethod
    def read(cls, directory: Path) -> Golden:
        body = read_object(directory / "golden.json")
        with np.load(directory / "golden.npz", allow_pickle=False) as arrays:
            tensors = {name: _texts(arrays[name]) for name in arrays.files}
        return cls(
            inputs={name[6:]: array for name, array in tensors.items() if name.startswith("input.")},
            outputs={name[7:]: array for name, array in tensors.items() if name.startswith("output.")},
            **body,
        )


def _without_objects(array: Array) -> Array:
    """Convert texts, which are objects in ONNX Runtime: objects would be pickled."""
    return array.astype(np.str_) if array.dtype == np.object_ else array


def _texts(array: Array) -> Array:
    return array.astype(np.object_) if array.dtype.kind == "U" else array


def null_for_nan(value: Any) -> Any:
    """Return a JSON value with None instead of NaN, which JSON does not have."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list | tuple):
        return [null_for_nan(item) for item in value]
    return {key: null_for_nan(item) for key, item in value.items()} if isinstance(value, dict) else value


def difference(expected: Any, actual: Any, rtol: float, atol: float, path: str = "") -> str | None:
    """Return where two JSON values differ: numbers by tolerance, everything else exactly. None if they are equal.

    NaN equals NaN. As JSON answers have null for NaN and infinite numbers, these equal null.
    """
    if expected is None or actual is None:
        is_same = _is_null_in_json(expected) and _is_null_in_json(actual)
        return None if is_same else f"{path or 'answer'}: expected {expected!r}, found {actual!r}"
    if isinstance(expected, float | int) and not isinstance(expected, bool):
        if isinstance(actual, bool) or not isinstance(actual, float | int):
            return f"{path or 'answer'}: expected the number {expected}, found {actual!r}"
        close = bool(np.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True))
        return None if close else f"{path or 'answer'}: expected {expected}, found {actual}"
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs: list[tuple[Any, Any, str]] = [
            (a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(expected, actual, strict=True))
        ]
    elif isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        pairs = [(expected[key], actual[key], f"{path}.{key}".lstrip(".")) for key in expected]
    else:
        same_kind = isinstance(expected, bool) == isinstance(actual, bool)  # Python's True equals 1
        is_equal = expected == actual and same_kind
        return None if is_equal else f"{path or 'answer'}: expected {expected!r}, found {actual!r}"
    return next((text for a, b, item_path in pairs if (text := difference(a, b, rtol, atol, item_path))), None)


def _is_null_in_json(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


@dataclass(frozen=True)
class GoldenRequest:
    path: str
    body: dict[str, Any] | None  # None: GET
    problem: Callable[[Any], str | None]  # returns what is wrong with an answer, if anything


def golden_requests(golden: Golden, name: str, inputs: Sequence[TensorSpec]) -> Iterator[GoldenRequest]:
    """Yield one request through the codec, if the task has an example, and one with raw tensors."""
    if golden.instances:
        yield GoldenRequest(
            f"/v1/models/{name}:predict",
            {"instances": golden.instances},
            lambda answer: difference(
                golden.predictions, _field(answer, "predictions"), golden.rtol, golden.atol, "predictions"
            ),
        )
    tensors = [
        {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "data": data}
        for spec in inputs
        for array in [golden.inputs[spec.name]]
        for data in [null_for_nan(array.ravel().tolist())]
    ]
    yield GoldenRequest(
        f"/v2/models/{name}/infer", {"inputs": tensors}, lambda answer: _compare_tensors(golden, answer)
    )


def _compare_tensors(golden: Golden, answer: Any) -> str | None:
    outputs = {item.get("name"): item for item in _field(answer, "outputs") or []}
    for name, expected in golden.outputs.items():
        if name not in outputs:
            return f"the answer has no output {name}"
        if outputs[name].get("shape") != list(expected.shape):
            return f"{name}: expected shape {list(expected.shape)}, found {outputs[name].get('shape')}"
        flat = np.asarray(outputs[name].get("data")).ravel().tolist()  # servers may nest or flatten
        if problem := difference(expected.ravel().tolist(), flat, golden.rtol, golden.atol, name):
            return problem
    return None


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None


Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


@dataclass
class Answer:
    """The tokens generated for one prompt, and the lead of each token's logit over the second best."""

    tokens: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)
    highest: list[float] = field(default_factory=list)  # the chosen tokens' logits


@dataclass(frozen=True)
class Decoder:
    """A decoder graph that can be run, with its tensors."""

    run: Run
    generation: Generation
    specs: Mapping[str, TensorSpec]  # of its inputs, by name


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], most: int, chunk: int = 0) -> list[Answer]:
    """Decode all prompts greedily in one batch, padded on the left; `chunk`: positions per step of the prefill."""
    ids, mask = pad(prompts)
    past = empty_past(decoder, len(prompts))
    answers = [Answer() for _ in prompts]
    step, logits = chunk or ids.shape[1], ids[:0]
    for start in range(0, ids.shape[1], step):
        end = min(start + step, ids.shape[1])
        logits, past = _read(decoder, ids[:, start:end], mask[:, :end], past)
    for count in range(most):
        chosen = _choose(answers, logits, decoder.generation)
        if count == most - 1 or all(answer.tokens[-1] in decoder.generation.end for answer in answers):
            break
        mask = np.concatenate([mask, np.ones((len(prompts), 1), np.int64)], axis=1)
        logits, past = _read(decoder, chosen[:, None], mask, past)
    return answers


def pad(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Return ids and mask of the prompts, padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = (np.zeros((len(prompts), longest), np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def empty_past(decoder: Decoder, rows: int) -> dict[str, Array]:
    """Return empty caches."""
    specs = [decoder.specs[cache.input] for cache in decoder.generation.caches]
    return {
        spec.name: np.zeros([rows, *(0 if isinstance(axis, str) else axis for axis in spec.shape[1:])], kind)
        for spec in specs
        for kind in [NUMPY_TYPES[spec.datatype]]
    }


def inputs_of(generation: Generation, ids: Array, mask: Array, past: Mapping[str, Array]) -> dict[str, Array]:
    """Return the graph's inputs for ids after a past; padding has position 0, which is masked."""
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, mask.shape[1] - ids.shape[1] :]
    return {generation.ids: ids, generation.mask: mask, generation.positions: positions, **past}


def _read(decoder: Decoder, ids: Array, mask: Array, past: Mapping[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Return the logits of the last position and the caches including the new positions."""
    generation = decoder.generation
    outputs = decoder.run(inputs_of(generation, ids, mask, past))
    return outputs[generation.logits][:, -1], {cache.input: outputs[cache.output] for cache in generation.caches}


def _choose(answers: Sequence[Answer], logits: Array, generation: Generation) -> Array:
    """Append the likeliest token to each answer that has not ended."""
    best: Array = logits.argmax(axis=-1)
    top = np.sort(np.partition(logits, -2, axis=-1)[:, -2:], axis=-1) if logits.shape[-1] > 1 else None
    for row, answer in enumerate(answers):
        if answer.tokens and answer.tokens[-1] in generation.end:
            continue
        answer.tokens.append(int(best[row]))
        answer.highest.append(float(logits[row, best[row]]))
        answer.leads.append(float("inf") if top is None else float(top[row, 1] - top[row, 0]))
    return best
