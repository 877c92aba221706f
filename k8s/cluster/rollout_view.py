"""`pipe deploy --watch`: the pods of the old and the new version during a roll-out, with their errors and latency."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from k8s.cluster.canary import is_ready, pod_address
from k8s.cluster.cluster import Cluster, Report
from k8s.cluster.rollout_status import pod_problem
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, format_selector, identity_labels
from pipeline.contract.canary import RequestCounts, parse_request_counts
from pipeline.system.errors import PipelineError
from pipeline.system.wording import align, milliseconds

_PAUSE_SECONDS = 2.0
_JOIN_SECONDS = 5.0  # for a request that is under way at the end
_WINDOW_SECONDS = 10.0  # of the rates and latencies that are shown
_FRACTION = 0.95
_HTTP_OK = 200
_HEADER = ("version and pods", "state", "requests/s", "failed", "p95")


@dataclass(frozen=True)
class PodView:
    """One pod, and what it has answered lately."""

    name: str
    version: str  # "old" or "new", or "live" where there is only one, with its bundle
    state: str
    is_ready: bool
    counts: RequestCounts
    seconds: float  # in which these requests were counted; 0 if they are not known


@dataclass
class RolloutView:
    """Reads the pods of one service again and again; those of a group that was there at the first time are old."""

    connect: Callable[[], Cluster]
    name: str
    headers: Mapping[str, str]  # credentials of the service
    clock: Callable[[], float] = time.monotonic
    _cluster: Cluster | None = None
    _old_groups: frozenset[str] | None = None
    _readings: dict[str, deque[tuple[float, RequestCounts]]] = field(default_factory=dict)

    def read(self) -> list[PodView]:
        self._cluster = self._cluster or self.connect()
        pods = self._cluster.select(format_selector(identity_labels(self.name, "serving")))
        if self._old_groups is None:
            self._old_groups = frozenset(map(_group, pods))
        new_groups = frozenset(map(_group, pods)) - self._old_groups
        old = [self._view(pod, "old" if new_groups else "live") for pod in pods if _group(pod) not in new_groups]
        new = [self._view(pod, "new") for pod in pods if _group(pod) in new_groups]
        by_bundle = operator.attrgetter("version", "name")
        return [*sorted(old, key=by_bundle), *sorted(new, key=by_bundle)]

    def _view(self, pod: Object, age: str) -> PodView:
        bundle = pod["metadata"].get("annotations", {}).get(BUNDLE_ANNOTATION, "unknown")
        counts, seconds = self._recent(pod) if is_ready(pod) else (RequestCounts(), 0.0)
        name = pod["metadata"]["name"]
        return PodView(name, f"{age} bundle {bundle[:12]}", describe_state(pod), is_ready(pod), counts, seconds)

    def _recent(self, pod: Object) -> tuple[RequestCounts, float]:
        """Return the requests since the oldest reading in the window, and the time since then."""
        assert self._cluster is not None
        name = pod["metadata"]["name"]
        address = pod_address(name, pod["spec"])
        status, _, raw = self._cluster.send(f"pods/{address}", "/metrics", headers=self.headers)
        if status != _HTTP_OK:
            return RequestCounts(), 0.0
        now, counts = self.clock(), parse_request_counts(raw.decode(errors="replace"), self.name)
        readings = self._readings.setdefault(name, deque())
        readings.append((now, counts))
        while len(readings) > 2 and readings[1][0] <= now - _WINDOW_SECONDS:
            readings.popleft()
        started_at, earlier = readings[0]
        return counts.since(earlier), now - started_at


def describe_state(pod: Object) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "ending"
    return "ready" if is_ready(pod) else pod_problem(pod) or "starting"


def table(views: Sequence[PodView]) -> list[str]:
    """Return a line for each version, and below it one for each of its pods."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for version, pods in _by_version(views):
        rows.append((version, _readiness(pods), *_cells(pods)))
        rows += [(f"  {pod.name}", pod.state, *_cells([pod])) for pod in pods]
    if len(rows) == 1:
        return ["no pods yet"]
    return align(rows, texts=2)


def _by_version(views: Sequence[PodView]) -> Iterator[tuple[str, list[PodView]]]:
    for version, pods in itertools.groupby(views, lambda view: view.version):
        yield version, list(pods)


def _readiness(pods: Sequence[PodView]) -> str:
    return f"{sum(pod.is_ready for pod in pods)} of {len(pods)} ready"


def _cells(pods: Sequence[PodView]) -> tuple[str, ...]:
    """Return rate, share of failures and latency, or nothing if they are not known."""
    known = [pod for pod in pods if pod.seconds]
    if not known:
        return ()
    rate = sum(pod.counts.requests / pod.seconds for pod in known)
    total = sum((pod.counts for pod in known), RequestCounts())
    failed = f"{total.failed / total.requests:.2%}" if total.requests else ""
    return f"{rate:.1f}", failed, _describe_latency(total) if total.timed else ""


def _describe_latency(counts: RequestCounts) -> str:
    """Describe the bound of the histogram that most requests kept."""
    if math.isfinite(bound := counts.seconds_of(_FRACTION)):
        return f"≤ {milliseconds(bound * 1e3)}"
    return f"> {milliseconds(max(filter(math.isfinite, counts.answered_within), default=0.0) * 1e3)}"


def _group(pod: Object) -> str:
    """Return what all pods of one version have in common: their ReplicaSet."""
    return str(pod["metadata"]["labels"].get("pod-template-hash") or pod["metadata"]["name"])


@contextmanager
def following(view: RolloutView, panel: Callable[[Sequence[str]], None] | None, report: Report) -> Iterator[None]:
    """Show the table in the panel of a terminal, or report how many pods are ready; at the end, report the table."""
    show = _log_changes(report) if panel is None else lambda views: panel(table(views))
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(view, show, ended), name="roll-out", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_JOIN_SECONDS)
        if panel is not None:
            panel([])
    with contextlib.suppress(PipelineError):
        for line in table(view.read()):
            report(line)


def _follow(view: RolloutView, show: Callable[[Sequence[PodView]], None], ended: threading.Event) -> None:
    while not ended.is_set():
        with contextlib.suppress(PipelineError):  # the deployment itself reports what is wrong
            show(view.read())
        ended.wait(_PAUSE_SECONDS)


def _log_changes(report: Report) -> Callable[[Sequence[PodView]], None]:
    """Return a function that reports how many pods of each version are ready, where that has changed."""
    reported: set[str] = set()

    def show(views: Sequence[PodView]) -> None:
        sentences = {f"{version}: {_readiness(pods)}" for version, pods in _by_version(views)}
        for sentence in sorted(sentences - reported, reverse=True):
            report(sentence)
        reported.clear()
        reported.update(sentences)

    return show
