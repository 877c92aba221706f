"""Compare the bundle's answers with those of the model's own library, where the task has a reference()."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pipeline.contract.golden import Golden
from pipeline.contract.task import HasReference, Task
from pipeline.system.errors import StageError

_SHOWN = 200  # characters of an answer in a message


def compare_reference(task: Task, model: nn.Module, golden: Golden) -> str:
    """Return a sentence about the comparison, empty where the task has no reference; raise for the first difference."""
    if not isinstance(task, HasReference):
        return ""
    answers = list(task.reference(golden.instances, model))
    if len(answers) != len(golden.predictions):
        raise StageError(f"reference(): gives {len(answers)} answers for {len(golden.predictions)} instances")
    for instance, prediction, answer in zip(golden.instances, golden.predictions, answers, strict=True):
        if (place := find_difference(prediction, answer, golden.rtol, golden.atol)) is not None:
            texts = [str(value)[:_SHOWN] for value in (prediction, answer, instance)]
            raise StageError(
                f"the bundle answers {texts[0]} and the model's own library {texts[1]} for {texts[2]}"
                f"{f' (they differ in {place})' if place else ''}; to fix it: correct decode() or encode() in the codec"
            )
    return f"{len(answers)} answers equal to those of the model's own library"


def find_difference(value: Any, expected: Any, rtol: float, atol: float) -> str | None:
    """Return where two plain values differ by more than the tolerance, None where they do not; "" is the whole."""
    if isinstance(value, Mapping) and isinstance(expected, Mapping) and value.keys() == expected.keys():
        items = [(f".{name}", value[name], expected[name]) for name in value]
    elif isinstance(value, Sequence) and isinstance(expected, Sequence) and not isinstance(value, str):
        if len(value) != len(expected):
            return ""
        items = [(f"[{i}]", *pair) for i, pair in enumerate(zip(value, expected, strict=True))]
    elif isinstance(value, float) and isinstance(expected, float | int):
        return None if math.isclose(value, expected, rel_tol=rtol, abs_tol=atol) else ""
    else:
        return None if value == expected else ""
    places = ((name, find_difference(a, b, rtol, atol)) for name, a, b in items)
    return next((name + place for name, place in places if place is not None), None)
