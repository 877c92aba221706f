"""The golden requests, asked of a loaded model before anybody else may ask.

Whether a model answers each row by itself: only then may the requests of strangers run as one batch.

The signature cannot tell: a model that normalises over the batch has the same names and shapes as one that does not.
So a golden row is asked alone and in company, and must be answered alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import BundleError, InvalidPayload
from pipeline.contract.golden import Decoder, Golden, difference, greedy
from serve.protocol.validate import check_arrays
from serve.runtime.predictor import Predictor
from serve.runtime.session import Session

Array = np.ndarray[Any, Any]


def check(bundle: Bundle, session: Session) -> None:
    """Raise BundleError, naming the answer that is wrong, unless every golden request gets its golden answer."""
    verify(bundle, Predictor(bundle, session))


def verify(bundle: Bundle, predictor: Predictor) -> None:
    try:
        golden = bundle.golden()
        wrong = _tensors(golden, predictor) or _instances(golden, predictor) or _generated(golden, predictor)
    except BundleError:
        raise
    except Exception as error:  # of user code and of a damaged golden file alike; the cause is kept
        raise BundleError(f"{bundle.path}: golden requests failed: {type(error).__name__}: {error}") from error
    if wrong:
        raise BundleError(f"{bundle.path}: golden requests: {wrong}; the model does not answer as it did at export")


def tensor_difference(expected: Mapping[str, Array], found: Mapping[str, Array], rtol: float, atol: float) -> str:
    """Where two sets of named arrays part; floating point within tolerance, all else exactly. Empty when they agree."""
    if expected.keys() != found.keys():
        return f"outputs are {', '.join(sorted(found))}, expected {', '.join(sorted(expected))}"
    for name, wanted in expected.items():
        got = found[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{name}: {got.dtype} {list(got.shape)}, expected {wanted.dtype} {list(wanted.shape)}"
        if not np.issubdtype(wanted.dtype, np.floating):
            wrong = got != wanted
        else:
            wrong = ~np.isclose(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
        if wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            return f"{name}{list(place)}: expected {wanted[place]}, found {got[place]} ({int(wrong.sum())} such)"
    return ""


def _tensors(golden: Golden, predictor: Predictor) -> str:
    try:
        check_arrays(golden.inputs, predictor.signature)
    except InvalidPayload as error:
        return str(error)
    return tensor_difference(golden.outputs, predictor.run(golden.inputs), golden.rtol, golden.atol)


def _instances(golden: Golden, predictor: Predictor) -> str:
    if not golden.instances:
        return ""
    found = json.loads(json.dumps(list(predictor.predict(golden.instances)), default=_plain))
    return difference(golden.predictions, found, golden.rtol, golden.atol, "predictions") or ""


def _generated(golden: Golden, predictor: Predictor) -> str:
    """Greedy answers, all in one batch."""
    generation = predictor.signature.generation
    if generation is None or not golden.generated:
        return ""
    decoder = Decoder(predictor.run, generation, predictor.signature.input_specs)
    wanted = [one["answer"] for one in golden.generated]
    answers = greedy(decoder, [one["prompt"] for one in golden.generated], max(1, *map(len, wanted)))
    for place, (answer, found) in enumerate(zip(wanted, answers, strict=True)):
        if found.tokens[: len(answer)] != answer:
            return f"generated[{place}]: expected {answer}, found {found.tokens[: len(answer)]}"
    return ""


def _plain(value: Any) -> Any:
    """A codec may answer with numpy values; the service sends them as numbers and lists too."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"codec.encode gave a {type(value).__name__}, which JSON cannot carry")


Arrays = Mapping[str, Array]


def why_not_merged(golden: Golden, run: Callable[[Arrays], Arrays], most: int) -> str:
    """The reason why requests must run one by one, or empty; `most` is the largest batch they are merged to."""
    if most < 2:
        return "serve.batch_rows is 1"
    first = _rows(golden.inputs, slice(0, 1))
    alone = run(first)
    last = [first] if most > 2 else []  # the place in the batch must not matter either
    for known, company in ((True, _rows(golden.inputs, slice(1, None))), (False, strangers(golden.inputs))):
        batch = [first, _rows(company, slice(0, most - 1 - len(last))), *last]
        try:
            found = run({name: np.concatenate([one[name] for one in batch]) for name in first})
        except Exception as error:
            if known:
                return f"golden requests cannot run together: {' '.join(str(error).split())}"
            continue  # the model may refuse strangers, as values no client sends
        for place in (slice(0, 1), slice(-1, None))[: 1 + len(last)]:
            if wrong := tensor_difference(alone, _rows(found, place), golden.rtol, golden.atol):
                return f"a golden request is answered otherwise in company than alone: {wrong}"
    return ""


def strangers(inputs: Arrays) -> Arrays:
    """Rows unlike the golden ones, of values like theirs: each row's own, moved on by one place, numbers halved."""
    found = {}
    for name, array in inputs.items():
        moved = np.roll(array.reshape(len(array), -1), 1, axis=1).reshape(array.shape)
        found[name] = (moved / 2).astype(array.dtype) if array.dtype.kind == "f" else moved
    return found


def _rows(arrays: Arrays, which: slice) -> dict[str, Array]:
    return {name: array[which] for name, array in arrays.items()}
