"""Deployments on a real API server with controllers, but without nodes."""

from __future__ import annotations

import base64
import contextlib
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster
from k8s.cluster.lease import Lease
from k8s.objects.kustomize import Object
from k8s.step_runner import Watcher
from pipeline.system.errors import ConfigError, PipelineError, ResourceError, StageError
from tests.serve import certificates

from .place import DEPLOYMENT, Place, Reports, wait_until
from .tcp_proxy import TcpProxy

pytestmark = [pytest.mark.cluster, pytest.mark.long]

OUTAGE_SECONDS = 30
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap"}


def config_map(name: str, value: str = "1") -> Object:
    return {**CONFIG_MAP, "metadata": {"name": name, "labels": {"app": "test"}}, "data": {"KEY": value}}


def test_apply_writes_plans_and_repeats(place: Place, reports: Reports) -> None:
    place.cluster.apply([config_map("options")], reports)
    place.cluster.apply([config_map("options", "2")], reports)
    place.cluster.apply([config_map("options", "2")], reports)
    assert reports.lines == [
        "plan: configmap/options: new", "plan: configmap/options: data.KEY: 1 → 2", "plan: nothing changes",
    ]  # fmt: skip


def test_fields_of_others_are_kept(place: Place, reports: Reports) -> None:
    cluster, item = place.cluster, config_map("options")
    cluster.apply([item], reports)
    live = cluster.read(item)
    assert live is not None
    live["data"]["KEY"] = "edited"
    path = f"/api/v1/namespaces/{place.namespace}/configmaps/options"
    assert place.request("PUT", path, live).ok
    with pytest.raises(ConfigError, match=r"\.data\.KEY was set by .*--force-conflicts --field-manager=pipe"):
        cluster.apply([item], reports)
    assert (cluster.read(item) or {})["data"] == {"KEY": "edited"}


def test_missing_namespace_is_named_with_its_fix(cluster: Cluster, reports: Reports) -> None:
    with pytest.raises(StageError, match="kubectl create namespace pipe-test-absent"):
        replace(cluster, namespace="pipe-test-absent").apply([config_map("options")], reports)


def test_only_one_deployment_holds_the_lease(place: Place, reports: Reports) -> None:
    connection = place.cluster.connection
    first, second = (Lease(connection, place.namespace, "twice-deploy", holder) for holder in ("first", "second"))
    with first.hold(1, reports) as check:
        with pytest.raises(ResourceError, match="first is deploying twice"), second.hold(2, reports):
            pass
        check()
    with second.hold(1, reports):
        pass


def test_quota_is_named_before_anything_is_applied(place: Place, reports: Reports) -> None:
    item, hard = config_map("options"), {"count/configmaps": "0"}
    created = place.create("resourcequotas", quota(hard))
    # A quota without a status is not enforced, and without controllers nothing else fills it.
    created["status"] = {"hard": hard, "used": hard}
    path = f"/api/v1/namespaces/{place.namespace}/resourcequotas/tests"
    wait_until(lambda: place.request("PUT", f"{path}/status", created).ok or _is_refused(place, item), "the quota", 30)
    wait_until(lambda: _is_refused(place, item), "the quota to be enforced", 30)
    with pytest.raises(StageError, match=r"the quota of namespace .* is used up"):
        place.cluster.apply([item], reports)
    assert place.cluster.read(item) is None


@pytest.mark.usefixtures("supported", "controllers")
def test_quota_of_pods_is_named_as_the_cause(place: Place, reports: Reports) -> None:
    place.create("resourcequotas", quota({"pods": "0"}))
    with pytest.raises(StageError, match=r"(?s)did not get ready.*exceeded quota"):
        place.deploy("stable", reports, place.config({"timeout_seconds": 30}))


def quota(hard: Mapping[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tests"}, "spec": {"hard": dict(hard)}}


@pytest.fixture
def silent_server() -> Iterator[int]:
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        stop, accepted = threading.Event(), list[socket.socket]()

        def accept() -> None:
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    accepted.append(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        yield int(listener.getsockname()[1])
        stop.set()
        thread.join()
        for connection in accepted:
            connection.close()


def test_webhook_timeout_is_named_and_nothing_is_applied(
    place: Place, reports: Reports, silent_server: int, tmp_path: Path
) -> None:
    """A remote API server cannot reach the address: there the webhook fails at once instead of by its timeout."""
    authority = base64.b64encode(certificates.make(tmp_path, "webhook").certificate.read_bytes()).decode()
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["*"], "resources": ["configmaps"]}
    webhook = {
        "name": "silent.pipe.test",
        "clientConfig": {"url": f"https://127.0.0.1:{silent_server}/", "caBundle": authority},
        "namespaceSelector": {"matchLabels": {"pipe-test": place.namespace}},
        "rules": [rule],
        "timeoutSeconds": 2,
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    label_namespace(place)
    collection = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": place.namespace},
        "webhooks": [webhook],
    }
    place.create(collection, body)
    try:
        wait_until(lambda: _is_refused(place, config_map("probe")), "the webhook to be called", 30)
        with pytest.raises(StageError, match=r'configmap/options: .*webhook "silent\.pipe\.test"'):
            place.cluster.apply([config_map("options")], reports)
        assert place.cluster.read(config_map("options")) is None
    finally:
        assert place.request("DELETE", f"{collection}/{place.namespace}").ok


def label_namespace(place: Place) -> None:
    path = f"/api/v1/namespaces/{place.namespace}"
    item = place.request("GET", path).json()
    item["metadata"]["labels"]["pipe-test"] = place.namespace
    assert place.request("PUT", path, item).ok


def _is_refused(place: Place, item: Object) -> bool:
    try:
        place.cluster.plan([item])
    except PipelineError:
        return True
    return False


def test_apply_after_an_outage_completes_what_was_begun(place: Place, reports: Reports, proxy: TcpProxy) -> None:
    cluster, items = Cluster.connect("", place.namespace), [config_map(name) for name in ("a", "b")]
    reports.on["plan:"] = lambda: proxy.fail_for(OUTAGE_SECONDS)
    with pytest.raises(ResourceError, match=f"{cluster.connection.server}.* does not answer"):
        cluster.apply(items, reports)
    proxy.wait_until_up()
    cluster.apply(items, reports)
    assert all(place.cluster.read(item) for item in items)
    cluster.connection.pool.clear()


def test_lease_outlives_a_short_outage(place: Place, reports: Reports, proxy: TcpProxy) -> None:
    connection = connect("")
    lease = Lease(connection, place.namespace, "twice-deploy", "first", renew_seconds=1)
    with lease.hold(1, reports) as check:
        proxy.fail_for(OUTAGE_SECONDS / 3)
        proxy.wait_until_up()
        check()
    with Lease(place.cluster.connection, place.namespace, "twice-deploy", "second").hold(1, reports):
        pass
    connection.pool.clear()


def test_watch_sees_what_changed_during_an_outage(place: Place, reports: Reports, proxy: TcpProxy) -> None:
    connection, seen = connect(""), queue.SimpleQueue[Mapping[str, Object]]()
    place.cluster.apply([config_map("before")], reports)
    watcher = Watcher(connection, CONFIG_MAP, place.namespace, "app=test", seen.put, reports)
    assert set(seen.get(timeout=30)) == {"before"}
    proxy.fail_for(OUTAGE_SECONDS)
    place.cluster.apply([config_map("during")], reports)
    assert set(seen.get(timeout=OUTAGE_SECONDS + 30)) == {"before", "during"}
    assert watcher.error is None
    watcher.close()
    connection.pool.clear()


@pytest.mark.usefixtures("supported")
def test_outage_before_the_dry_run_leaves_nothing(place: Place, reports: Reports, proxy: TcpProxy) -> None:
    reports.on["deploying to"] = lambda: proxy.fail_for(OUTAGE_SECONDS)
    with pytest.raises(ResourceError, match="does not answer"):
        place.deploy("stable", reports)
    assert place.cluster.read(DEPLOYMENT) is None
