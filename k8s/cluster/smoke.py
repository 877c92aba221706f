"""Golden requests, sent to a deployed service: it must answer them as the model did at export."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from k8s.cluster.api import Unreachable
from k8s.cluster.cluster import Cluster, Report, ServiceResponse
from pipeline.contract.bundle import PROBE_ID, Bundle
from pipeline.contract.golden import GoldenRequest
from pipeline.system.errors import StageError

_RETRY_TIMEOUT_SECONDS = 30.0  # endpoints and proxies follow a roll-out with a delay
_RETRY_PAUSE_SECONDS = 0.5
_RETRYABLE_STATUSES = (502, 503, 504)
_HTTP_OK = 200
_DIGEST_HEADER = "x-bundle-digest"
_READY = "/v2/health/ready"


@dataclass(frozen=True)
class Expected:
    """What a service must answer; without its bundle on this machine, only that it has this bundle can be checked."""

    digest: str
    requests: tuple[GoldenRequest, ...] = (GoldenRequest(_READY, None, lambda _: None),)

    @classmethod
    def from_bundle(cls, bundle: Bundle | None, digest: str) -> Expected:
        return cls(digest) if bundle is None else cls(digest, tuple(bundle.golden_requests()))

    def describe(self, count: int) -> str:
        if count and self.requests[0].path == _READY:
            return f"it serves bundle {self.digest[:12]}, which is not on this machine, so its answers are not checked"
        return f"{count} golden requests answered as at export"


def check_service(
    cluster: Cluster,
    service: str,
    expected: Expected,
    report: Report,
    headers: Mapping[str, str],
    previous: frozenset[str] = frozenset(),
) -> int:
    """Send all golden requests to a service; return their number.

    Pods of the bundles `previous` may still answer, because Endpoints follow a roll-out with a delay.
    """
    count, without_digest = _check_golden_requests(cluster, f"services/{service}:http", expected, headers, previous)
    if without_digest:
        report("warning: the answers came without an x-bundle-digest header; only their values were checked")
    return count


def check_pod(cluster: Cluster, pod: str, expected: Expected, headers: Mapping[str, str]) -> int:
    """Send all golden requests to one pod; return their number."""
    return _check_golden_requests(cluster, f"pods/{pod}", expected, headers)[0]


def read_metrics(cluster: Cluster, pod: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """Return status and text of a pod's `/metrics`."""
    send = functools.partial(cluster.send, f"pods/{pod}", "/metrics", headers=headers)
    status, _, raw = _send_with_retries(send)
    return status, raw.decode(errors="replace")


def _check_golden_requests(
    cluster: Cluster,
    target: str,
    expected: Expected,
    headers: Mapping[str, str],
    previous: frozenset[str] = frozenset(),
) -> tuple[int, int]:
    """Return how many requests were sent, and how many responses named no bundle."""
    without_digest = 0
    for golden in expected.requests:

        def is_late(response: ServiceResponse, golden: GoldenRequest = golden) -> bool:
            digest = response[1].get(_DIGEST_HEADER)
            return digest in previous - {expected.digest} or bool(
                not digest and previous and _problem(golden, response)
            )

        send = functools.partial(cluster.send, target, golden.path, golden.body, {**headers, "x-request-id": PROBE_ID})
        response = _send_with_retries(send, is_late)
        without_digest += _is_digest_missing(golden.path, response[1], expected.digest)
        if problem := _problem(golden, response):
            raise StageError(f"golden request {golden.path}: {problem}")
    return len(expected.requests), without_digest


def _problem(golden: GoldenRequest, response: ServiceResponse) -> str:
    """Return how an answer differs from that at export; empty if it does not."""
    status, _, raw = response
    if status != _HTTP_OK:
        return f"answered {status}: {raw.decode(errors='replace')[:200]}"
    try:
        body = json.loads(raw)
    except ValueError:
        return f"the answer is not JSON: {raw[:100]!r}"
    problem = golden.problem(body)
    return f"{problem}; what runs is not what was evaluated" if problem else ""


def _is_digest_missing(path: str, headers: dict[str, str], expected: str) -> bool:
    """Return whether a proxy dropped the header; the digest of another bundle is an error."""
    digest = headers.get(_DIGEST_HEADER)
    if digest not in (None, expected):
        raise StageError(
            f"golden request {path}: answered by bundle {digest}, not {expected}; "
            "the image contains another bundle, or the Service selects other pods"
        )
    return digest is None


def _send_with_retries(
    send: Callable[[], ServiceResponse], is_late: Callable[[ServiceResponse], bool] = lambda _: False
) -> ServiceResponse:
    """Send until the status is not transient and the response is not a late one of another version."""
    deadline = time.monotonic() + _RETRY_TIMEOUT_SECONDS
    while True:
        try:
            response = send()
        except Unreachable:  # repeating a prediction changes nothing
            if time.monotonic() >= deadline:
                raise
        else:
            if time.monotonic() >= deadline or not (response[0] in _RETRYABLE_STATUSES or is_late(response)):
                return response
        time.sleep(_RETRY_PAUSE_SECONDS)
