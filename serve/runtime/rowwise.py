"""Whether a model answers each row by itself: only then may the requests of strangers run as one batch.

The signature cannot tell: a model that normalises over the batch has the same names and shapes as one that does not.
So a golden row is asked alone and in company, and must be answered alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipeline.spec.golden import Golden
from serve.runtime.selfcheck import tensor_difference

Array = np.ndarray[Any, Any]
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
