"""Checks of a loaded model before it serves: golden requests, and whether requests may share a batch.

The signature cannot show whether rows are independent: a model that normalizes over the batch has the same names and
shapes as one that does not. So a golden row is run alone and in a batch, and the results are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.codec import Array, Arrays
from pipeline.contract.golden import Decoder, Golden, difference, greedy
from pipeline.system.errors import BundleError, InvalidPayload
from serve.protocol.validate import check_arrays
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session


def check_golden_requests(bundle: Bundle, session: Session) -> None:
    """Raise BundleError unless the model returns the golden answer to every golden request."""
    verify(bundle, Predictor(bundle, session))


def verify(bundle: Bundle, predictor: Predictor) -> None:
    try:
        golden = bundle.golden()
        checks = (_tensor_mismatch, _prediction_mismatch, _generation_mismatch)
        wrong = next((text for check in checks if (text := check(golden, predictor))), "")
    except BundleError:
        raise
    except Exception as error:  # from user code or a damaged golden file
        raise BundleError(f"{bundle.path}: golden requests failed: {type(error).__name__}: {error}") from error
    if wrong:
        raise BundleError(f"{bundle.path}: golden requests: {wrong}; the model does not answer as it did at export")


def tensor_difference(expected: Mapping[str, Array], found: Mapping[str, Array], rtol: float, atol: float) -> str:
    """Describe the first difference of named arrays; empty if they agree. Only floats have a tolerance."""
    if expected.keys() != found.keys():
        return f"outputs are {', '.join(sorted(found))}, expected {', '.join(sorted(expected))}"
    for name, array in expected.items():
        other = found[name]
        if other.shape != array.shape or other.dtype != array.dtype:
            return f"{name}: {other.dtype} {list(other.shape)}, expected {array.dtype} {list(array.shape)}"
        if not np.issubdtype(array.dtype, np.floating):
            wrong = other != array
        else:
            wrong = ~np.isclose(other, array, rtol=rtol, atol=atol, equal_nan=True)
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            count = int(wrong.sum())
            return f"{name}{list(index)}: expected {array[index]}, found {other[index]} ({count} differ)"
    return ""


def _tensor_mismatch(golden: Golden, predictor: Predictor) -> str:
    try:
        check_arrays(golden.inputs, predictor.signature)
    except InvalidPayload as error:
        return str(error)
    return tensor_difference(golden.outputs, predictor.run(golden.inputs), golden.rtol, golden.atol)


def _prediction_mismatch(golden: Golden, predictor: Predictor) -> str:
    if not golden.instances:
        return ""
    found = json.loads(json.dumps(list(predictor.predict(golden.instances)), default=_plain))
    return difference(golden.predictions, found, golden.rtol, golden.atol, "predictions") or ""


def _generation_mismatch(golden: Golden, predictor: Predictor) -> str:
    """Decode all golden prompts greedily in one batch."""
    generation = predictor.signature.generation
    if generation is None or not golden.generated:
        return ""
    decoder = Decoder(predictor.run, generation, predictor.signature.input_specs)
    expected = [entry["answer"] for entry in golden.generated]
    results = greedy(decoder, [entry["prompt"] for entry in golden.generated], max(1, *map(len, expected)))
    for index, (answer, result) in enumerate(zip(expected, results, strict=True)):
        if result.tokens[: len(answer)] != answer:
            return f"generated[{index}]: expected {answer}, found {result.tokens[: len(answer)]}"
    return ""


def _plain(value: Any) -> Any:
    """Convert numpy values from a codec, as the service does."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"codec.encode returned a {type(value).__name__}, which is not valid in JSON")


def merging_problem(golden: Golden, run: Callable[[Arrays], Arrays], max_rows: int) -> str:
    """Return why requests must not share a batch of up to `max_rows` rows; empty where they may."""
    if max_rows < 2:
        return "serve.batch_rows is 1"
    first = _rows(golden.inputs, slice(0, 1))
    single = run(first)
    last = [first] if max_rows > 2 else []  # the position in the batch must not matter either
    for are_golden, others in ((True, _rows(golden.inputs, slice(1, None))), (False, other_rows(golden.inputs))):
        batch = [first, _rows(others, slice(0, max_rows - 1 - len(last))), *last]
        try:
            outputs = run({name: np.concatenate([part[name] for part in batch]) for name in first})
        except Exception as error:
            if are_golden:
                return f"golden requests cannot run as one batch: {' '.join(str(error).split())}"
            continue  # the model may reject made-up values
        for position in (slice(0, 1), slice(-1, None))[: 1 + len(last)]:
            if wrong := tensor_difference(single, _rows(outputs, position), golden.rtol, golden.atol):
                return f"a golden request gets another answer in a batch than alone: {wrong}"
    return ""


def other_rows(inputs: Arrays) -> Arrays:
    """Return rows that differ from the golden ones but have similar values: shifted by one element, floats halved."""
    rows = {}
    for name, array in inputs.items():
        moved = np.roll(array.reshape(len(array), -1), 1, axis=1).reshape(array.shape)
        rows[name] = (moved / 2).astype(array.dtype) if array.dtype.kind == "f" else moved
    return rows


def _rows(arrays: Arrays, rows: slice) -> dict[str, Array]:
    return {name: array[rows] for name, array in arrays.items()}
