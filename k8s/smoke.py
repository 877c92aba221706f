"""The golden requests, asked of the service on the cluster and answered as at export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from k8s.cluster import Cluster
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import StageError
from pipeline.spec.golden import Golden, difference

_PATIENCE_SECONDS = 30.0  # endpoints and proxies follow a roll-out with a delay
_NOT_THERE_YET = (502, 503, 504)


def check(cluster: Cluster, namespace: str, service: str, bundle: Bundle, say: Callable[[str], None]) -> int:
    """Returns how many requests were answered as they should be."""
    unnamed = 0
    asked = list(_requests(bundle))
    for path, body, judge in asked:
        status, headers, raw = _ask(cluster, namespace, service, path, body)
        if status != 200:
            raise StageError(f"golden request {path}: answered {status}: {raw.decode(errors='replace')[:200]}")
        unnamed += _check_header(path, headers, bundle)
        if problem := judge(_parse(path, raw)):
            raise StageError(f"golden request {path}: {problem}; what runs is not what was judged")
    if unnamed:
        say("warning: the answers came without an x-bundle-digest header; only their values were checked")
    return len(asked)


def _requests(bundle: Bundle) -> Iterator[tuple[str, Any, Callable[[Any], str | None]]]:
    """Path, body and a judge of the answer, for both protocols."""
    golden = bundle.golden()
    if golden.instances:
        yield (
            f"/v1/models/{bundle.name}:predict",
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
    yield f"/v2/models/{bundle.name}/infer", {"inputs": tensors}, lambda answer: _compare_tensors(golden, answer)


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


def _check_header(path: str, headers: dict[str, str], bundle: Bundle) -> bool:
    """Another bundle's digest is an error; returns whether a proxy dropped the header."""
    digest = headers.get("x-bundle-digest")
    if digest not in (None, bundle.digest):
        raise StageError(
            f"golden request {path}: answered by bundle {digest}, not {bundle.digest}; "
            "the image holds another bundle, or the Service selects other pods"
        )
    return digest is None


def _ask(cluster: Cluster, namespace: str, service: str, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        answer = cluster.post(namespace, service, "http", path, body)
        if answer[0] not in _NOT_THERE_YET or time.monotonic() >= deadline:
            return answer
        time.sleep(0.5)


def _parse(path: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise StageError(f"golden request {path}: the answer is not JSON: {raw[:100]!r}") from error


def _field(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None
