"""The golden requests as HTTP, for whoever asks a running service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.contract.bundle import Bundle
from pipeline.contract.golden import Golden, difference


@dataclass(frozen=True)
class GoldenRequest:
    path: str
    body: dict[str, Any]
    problem: Callable[[Any], str | None]  # what is wrong with an answer, if anything


def golden_requests(bundle: Bundle, version: str = "") -> Iterator[GoldenRequest]:
    """One through the codec where the task has an example, one on raw tensors; of one version where it is named."""
    golden = bundle.golden()
    name = f"{bundle.name}/versions/{version}" if version else bundle.name
    if golden.instances:
        yield GoldenRequest(
            f"/v1/models/{name}:predict",
            {"instances": golden.instances},
            lambda answer: difference(
                golden.predictions, _field(answer, "predictions"), golden.rtol, golden.atol, "predictions"
            ),
        )
    tensors = [
        {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
        for spec in bundle.signature.inputs
        for array in [golden.inputs[spec.name]]
    ]
    yield GoldenRequest(
        f"/v2/models/{name}/infer", {"inputs": tensors}, lambda answer: _compare_tensors(golden, answer)
    )


def _compare_tensors(golden: Golden, answer: Any) -> str | None:
    found = {item.get("name"): item for item in _field(answer, "outputs") or []}
    for name, expected in golden.outputs.items():
        if name not in found:
            return f"the answer has no output {name}"
        if found[name].get("shape") != list(expected.shape):
            return f"{name}: expected shape {list(expected.shape)}, found {found[name].get('shape')}"
        flat = np.asarray(found[name].get("data")).ravel().tolist()  # servers may nest or flatten
        if problem := difference(expected.ravel().tolist(), flat, golden.rtol, golden.atol, name):
            return problem
    return None


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None
