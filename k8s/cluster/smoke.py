"""The golden requests, asked of the service on the cluster and answered as at export."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from k8s.cluster.api import Unreachable
from k8s.cluster.cluster import Cluster
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import StageError
from pipeline.contract.golden_http import golden_requests

_PATIENCE_SECONDS = 30.0  # endpoints and proxies follow a roll-out with a delay
_PAUSE_SECONDS = 0.5
_NOT_THERE_YET = (502, 503, 504)

Ask = Callable[[str, Any], tuple[int, dict[str, str], bytes]]  # path and body → status, headers, body


def check(
    cluster: Cluster,
    namespace: str,
    service: str,
    bundle: Bundle,
    say: Callable[[str], None],
    entry: Mapping[str, str],
) -> int:
    """Returns how many requests were answered as they should be."""
    asked, unnamed = _check(bundle, lambda path, body: cluster.post(namespace, service, "http", path, body, entry))
    if unnamed:
        say("warning: the answers came without an x-bundle-digest header; only their values were checked")
    return asked


def check_pod(cluster: Cluster, namespace: str, pod: str, bundle: Bundle, entry: Mapping[str, str]) -> int:
    """One pod by itself, whoever else stands behind its Service."""
    return _check(bundle, lambda path, body: cluster.ask_pod(namespace, pod, path, body, entry))[0]


def read_metrics(cluster: Cluster, namespace: str, pod: str, entry: Mapping[str, str]) -> tuple[int, str]:
    """Status and text, asked again where a proxy stumbles."""
    status, _, raw = _patiently(lambda path, _: cluster.ask_pod(namespace, pod, path, headers=entry), "/metrics", None)
    return status, raw.decode(errors="replace")


def _check(bundle: Bundle, ask: Ask) -> tuple[int, int]:
    """How many were asked, and how many answers named no bundle."""
    unnamed = 0
    asked = list(golden_requests(bundle))
    for golden in asked:
        status, headers, raw = _patiently(ask, golden.path, golden.body)
        if status != 200:
            raise StageError(f"golden request {golden.path}: answered {status}: {raw.decode(errors='replace')[:200]}")
        unnamed += _check_header(golden.path, headers, bundle)
        if problem := golden.problem(_parse(golden.path, raw)):
            raise StageError(f"golden request {golden.path}: {problem}; what runs is not what was judged")
    return len(asked), unnamed


def _check_header(path: str, headers: dict[str, str], bundle: Bundle) -> bool:
    """Another bundle's digest is an error; returns whether a proxy dropped the header."""
    digest = headers.get("x-bundle-digest")
    if digest not in (None, bundle.digest):
        raise StageError(
            f"golden request {path}: answered by bundle {digest}, not {bundle.digest}; "
            "the image holds another bundle, or the Service selects other pods"
        )
    return digest is None


def _patiently(ask: Ask, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            answer = ask(path, body)
        except Unreachable:  # a connection that was cut: to ask the model twice changes nothing
            if time.monotonic() >= deadline:
                raise
        else:
            if answer[0] not in _NOT_THERE_YET or time.monotonic() >= deadline:
                return answer
        time.sleep(_PAUSE_SECONDS)


def _parse(path: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise StageError(f"golden request {path}: the answer is not JSON: {raw[:100]!r}") from error
