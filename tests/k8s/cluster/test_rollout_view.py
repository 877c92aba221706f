"""`pipe deploy --watch` against the test API server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from k8s.cluster.cluster import Cluster
from k8s.cluster.rollout_view import RolloutView, following, table
from k8s.objects.kustomize import Object
from k8s.objects.manifests import BUNDLE_ANNOTATION, identity_labels
from pipeline.system.errors import StageError

from ..api_server import ApiServer
from .test_canary import metrics_text

READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
STARTING = {"phase": "Pending", "conditions": []}
WAITING = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
STUCK = {"phase": "Pending", "containerStatuses": [{"name": "c", "state": WAITING}]}
OLD, NEW = "a" * 64, "b" * 64


def add(api: ApiServer, name: str, bundle: str, status: Object, args: Sequence[str] = ()) -> None:
    labels = {**identity_labels("twice", "serving"), "pod-template-hash": bundle[:4]}
    metadata = {"name": name, "labels": labels, "annotations": {BUNDLE_ANNOTATION: bundle}}
    spec = {"containers": [{"name": "c", "args": list(args)}]}
    api.add({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})


@pytest.fixture
def view(api: ApiServer) -> RolloutView:
    ticks = iter(range(0, 1000, 5))
    return RolloutView(lambda: Cluster.connect("", "default"), "twice", {}, clock=lambda: float(next(ticks)))


def test_table_shows_pods_errors_and_latency_of_both_versions(api: ApiServer, view: RolloutView) -> None:
    counted = [(1000, 0), (1500, 50)]

    def respond(pod: str, path: str, body: Any) -> Any:
        return (200, {}, metrics_text(*counted.pop(0), 0.05)) if pod == "twice-a" else (401, {}, "no key")

    api.pod = respond
    assert table(view.read()) == ["no pods yet"]
    view = RolloutView(view.connect, view.name, {}, view.clock)
    add(api, "twice-a", OLD, READY)
    assert table(view.read())[1].split() == ["live", "bundle", OLD[:12], "1", "of", "1", "ready"]
    add(api, "twice-b", NEW, STARTING)
    add(api, "twice-c", NEW, STUCK)
    add(api, "twice-d", NEW, READY)
    assert table(view.read()) == [
        "version and pods         state         requests/s  failed       p95",
        "old bundle aaaaaaaaaaaa  1 of 1 ready       100.0  10.00%  ≤ 100 ms",
        "  twice-a                ready              100.0  10.00%  ≤ 100 ms",
        "new bundle bbbbbbbbbbbb  1 of 3 ready",
        "  twice-b                starting",
        "  twice-c                ImagePullBackOff: no such image",
        "  twice-d                ready",
    ]
    assert api.pod_ports == {"8080"}


def test_rates_are_those_of_the_last_seconds(api: ApiServer, view: RolloutView) -> None:
    requests = iter((0, 1000, 1000, 1000, 1000))
    api.pod = lambda *_: (200, {}, metrics_text(next(requests), 0, 0.005))
    add(api, "twice-a", OLD, READY)
    rates = [pod.counts.requests / pod.seconds if pod.seconds else None for _ in range(5) for pod in view.read()]
    assert rates == [None, 200, 100, 0, 0]


def test_latencies_beyond_the_histogram_are_named_as_such(api: ApiServer, view: RolloutView) -> None:
    requests = iter((0, 1000))
    api.pod = lambda *_: (200, {}, metrics_text(next(requests), 0, 5.0))
    add(api, "twice-a", OLD, READY)
    view.read()
    assert table(view.read())[-1].endswith("> 100 ms")


def test_without_a_terminal_changes_are_reported_and_the_table_at_the_end(api: ApiServer, view: RolloutView) -> None:
    api.pod = lambda *_: (200, {}, metrics_text(10, 0, 0.005))
    add(api, "twice-a", OLD, READY)
    lines, seen = list[str](), threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        seen.set()

    with following(view, None, report):
        assert seen.wait(30)
    assert lines[0] == f"live bundle {OLD[:12]}: 1 of 1 ready"
    assert lines[1:] == table(view.read())


def test_panel_is_cleared_at_the_end_despite_api_errors(api: ApiServer, view: RolloutView) -> None:
    panels, seen = list[Sequence[str]](), threading.Event()

    def panel(lines: Sequence[str]) -> None:
        panels.append(lines)
        seen.set()

    with following(view, panel, pytest.fail):
        assert seen.wait(30)
        api.fail("GET", "/pods", status=403, times=-1)
    assert panels[0] == ["no pods yet"]
    assert panels[-1] == []


def test_the_error_of_a_deployment_is_passed_on(api: ApiServer, view: RolloutView) -> None:
    with pytest.raises(StageError, match="timeout"), following(view, None, lambda _: None):
        raise StageError("timeout")
