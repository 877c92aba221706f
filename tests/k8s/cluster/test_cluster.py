from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.cluster import Cluster
from k8s.objects import serving
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ResourceError, StageError

from ..api_requests import ApiRequest
from ..api_server import ApiServer, Fault
from ..conftest import Configure
from ..mock_pods import MockPod

IMAGE = "twice:1"


def fast_polling_cluster() -> Cluster:
    cluster = Cluster.connect("", "default")
    return Cluster(cluster.connection, cluster.version, "default", poll_seconds=0.01)


@pytest.fixture
def objects(configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    return serving.serving_objects(configure(), bundle, IMAGE)


@pytest.fixture
def kserve(configure: Configure, bundle: Bundle, api: ApiServer) -> list[dict[str, Any]]:
    api.crds.add("serving.kserve.io/v1beta1")
    return serving.serving_objects(configure({"target": "kserve"}), bundle, IMAGE)


@pytest.mark.usefixtures("no_cluster")
def test_error_without_a_kubeconfig_names_the_variable_to_set() -> None:
    with pytest.raises(ResourceError, match="set KUBECONFIG"):
        Cluster.connect("", "default")


def test_unreachable_server_is_named(api: ApiServer, tmp_path: Path) -> None:
    server = ApiServer()
    server.close()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(ResourceError, match=f"{server.url}.*does not answer"):
        Cluster.connect("", "default")


def test_wrong_credentials_are_reported_as_such(api: ApiServer, tmp_path: Path) -> None:
    api.write_kubeconfig(tmp_path / "kubeconfig", token="stolen")
    with pytest.raises(ResourceError, match="refuses our credentials \\(401\\): Unauthorized"):
        Cluster.connect("", "default")


@pytest.mark.parametrize("page", ["<!doctype html><title>Log in</title>", '["not", "ours"]'])
def test_a_login_page_in_place_of_the_api_server_is_named(page: str, api: ApiServer) -> None:
    api.login_page = page
    with pytest.raises(
        ResourceError, match=rf"{api.url} \(context small\): what answers is not a Kubernetes API server"
    ):
        Cluster.connect("", "default")


def test_apply_is_server_side_and_strict(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    applied = fast_polling_cluster().apply(objects, print)
    assert applied[0] == "serviceaccount/twice"
    assert len([path for path in api.objects if "/replicasets/" not in path]) == len(objects) == len(applied)
    patches = [(query, kind) for method, _, query, kind in api.requests if method == "PATCH"]
    expected = {"fieldManager": "pipe", "fieldValidation": "Strict"}
    assert patches[-1] == (expected, "application/apply-patch+yaml")


def test_a_refused_object_leaves_nothing_half_applied(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    objects[-1]["spec"]["minAvialable"] = 1
    with pytest.raises(StageError, match=r"poddisruptionbudget/twice: the cluster refused it .*minAvialable"):
        fast_polling_cluster().apply(objects, print)
    assert api.objects == {}


def test_warnings_of_the_server_are_reported(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    reports: list[str] = []
    api.warning = 'would violate PodSecurity, by \\"policy\\"'
    fast_polling_cluster().apply(objects[:1], reports.append)
    assert reports[1:] == ['warning: serviceaccount/twice: would violate PodSecurity, by "policy"']


def test_a_cluster_without_kserve_is_reported_with_the_fix(api: ApiServer, kserve: list[dict[str, Any]]) -> None:
    api.crds.clear()
    with pytest.raises(StageError, match=r"install KServe .*, or set deploy\.target=kubernetes"):
        fast_polling_cluster().apply(kserve, print)


def test_waiting_ends_when_the_deployment_is_rolled_out(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    reports: list[str] = []
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    cluster.wait(objects, 10, reports.append)
    assert reports == ["deployment/twice: 0 of 2 updated replicas available", "deployment/twice: 2 replicas available"]


def test_a_new_deployment_is_not_done_before_the_autoscaler_has_scaled_it(
    api: ApiServer, objects: list[dict[str, Any]]
) -> None:
    reports: list[str] = []
    api.unready_polls, api.unscaled_polls = 0, 2
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    cluster.wait(objects, 10, reports.append)
    assert reports == ["deployment/twice: 1 of 2 replicas updated", "deployment/twice: 2 replicas available"]


def test_waiting_survives_a_busy_api_server(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    reports: list[str] = []
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    api.fail("GET", "/deployments/", status=503)
    api.fail("GET", "/deployments/", status=429)
    cluster.wait(objects, 10, reports.append)
    assert reports[0] == "deployment/twice: the API server answers 503"
    assert reports[-1] == "deployment/twice: 2 replicas available"


def test_waiting_for_kserve_ends_with_its_ready_condition(api: ApiServer, kserve: list[dict[str, Any]]) -> None:
    reports: list[str] = []
    cluster = fast_polling_cluster()
    cluster.apply(kserve, print)
    cluster.wait(kserve, 10, reports.append)
    assert reports == ["inferenceservice/twice: Ready: pods start", "inferenceservice/twice: ready"]


def test_kserve_is_not_ready_while_its_deployment_runs_another_bundle(
    api: ApiServer, kserve: list[dict[str, Any]], objects: list[dict[str, Any]]
) -> None:
    api.unready_polls = 0
    cluster = fast_polling_cluster()
    old = next(item for item in objects if item["kind"] == "Deployment")
    old["metadata"]["name"] = "twice-predictor"
    old["spec"]["template"]["metadata"]["annotations"]["pipe-road/bundle"] = "0" * 64
    cluster.apply([*kserve, old], print)
    with pytest.raises(StageError, match="has not adopted the new version"):
        cluster.wait(kserve, 0.05, print)


WAITING = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "twice:1"'}
CRASHED = {
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 2, "message": "bundle damaged\n"}},
}
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": WAITING}}]}, "ImagePullBackOff: Back-off"),
        ({"phase": "Running", "containerStatuses": [CRASHED]}, "CrashLoopBackOff: .*exit code 2, bundle damaged"),
        ({"phase": "Pending", "conditions": [UNSCHEDULED]}, "Pending: 0/3 nodes: insufficient nvidia.com/gpu"),
    ],
)
def test_a_stuck_roll_out_names_the_reason_of_its_pods(
    status: dict[str, Any], problem: str, api: ApiServer, objects: list[dict[str, Any]]
) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    api.add_pod("twice-abc", labels, status)
    api.unready_polls = 10**6
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    with pytest.raises(StageError, match=f"twice-abc: {problem}"):
        cluster.wait(objects, 0.1, print)


def test_the_last_lines_of_a_crashed_pod_are_reported(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    path = api.add_pod("twice-abc", labels, {"phase": "Running", "containerStatuses": [{"name": "server", **CRASHED}]})
    api.nodes.pods[path] = MockPod(api.store, path, "", 0)
    api.nodes.pods[path].log("cannot read model.onnx")
    api.unready_polls = 10**6
    cluster, reports = fast_polling_cluster(), list[str]()
    cluster.apply(objects, print)
    with pytest.raises(StageError, match="did not get ready"):
        cluster.wait(objects, 0.05, reports.append)
    assert reports[-2:] == ["the last lines of twice-abc:", "    cannot read model.onnx"]
    (query,) = (query for _, target, query, _ in api.requests if target == f"{path}/log")
    assert (query["container"], query["previous"]) == ("server", "true")


def test_image_whose_pull_takes_too_long_is_named(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    creating = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    api.add_pod("twice-abc", labels, {"phase": "Pending", "containerStatuses": [creating]})
    for second, reason, message in ((1, "Scheduled", "to node-1"), (2, "Pulling", f'Pulling image "{IMAGE}"')):
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"twice-abc.{second}"},
            "type": "Normal",
            "reason": reason,
            "message": message,
            "involvedObject": {"kind": "Pod", "name": "twice-abc"},
            "lastTimestamp": f"2026-01-01T00:00:0{second}Z",
        }
        api.add(event)
    api.unready_polls = 10**6
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    with pytest.raises(StageError, match=f'twice-abc: Pulling: Pulling image "{IMAGE}"'):
        cluster.wait(objects, 0.05, print)


def conditions(changed: str, **status: str) -> list[dict[str, str]]:
    return [{"type": kind, "status": value, "lastTransitionTime": changed} for kind, value in status.items()]


EARLIER = "2026-01-01T00:00:00Z"
STARTED = {"phase": "Running", "startTime": EARLIER}
# What the node controller makes of a running pod, what a stopped kubelet leaves, and a pod that starts.
LOST = {**STARTED, "conditions": conditions(EARLIER, ContainersReady="True", Ready="False")}
NOT_TAKEN = {"phase": "Pending", "conditions": conditions(EARLIER, PodScheduled="True")}
STARTING = {**STARTED, "conditions": conditions(EARLIER, PodScheduled="True", ContainersReady="False", Ready="False")}
SCHEDULED = {"phase": "Pending", "conditions": conditions("2999-01-01T00:00:00Z", PodScheduled="True")}


@pytest.mark.parametrize(
    ("status", "node", "problem"),
    [
        (LOST, "Unknown", "twice-0: node kind-2 is not ready, Kubelet stopped, since TIME"),
        (LOST, "forbidden", "twice-0: node kind-2 has not responded since TIME"),
        (NOT_TAKEN, "True", "twice-0: node kind-2 has not responded since TIME"),
        (STARTING, "forbidden", ""),
        (SCHEDULED, "True", ""),
    ],
    ids=["lost", "lost, may not read", "kubelet stopped", "starting", "just scheduled"],
)
def test_a_node_that_does_not_respond_is_named(
    status: dict[str, Any], node: str, problem: str, api: ApiServer, objects: list[dict[str, Any]]
) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    metadata = {"name": "twice-0", "labels": deployment["spec"]["template"]["metadata"]["labels"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "kind-2"}}
    api.add({**body, "status": status})
    if node == "forbidden":
        api.fail("GET", "/api/v1/nodes/", status=403, times=-1)
    ready = {"type": "Ready", "status": node, "lastTransitionTime": EARLIER, "message": "Kubelet stopped"}
    api.store.create("/api/v1/nodes/kind-2", {"kind": "Node", "metadata": {}, "status": {"conditions": [ready]}})
    problems = "; ".join(fast_polling_cluster().pod_problems(deployment))
    assert re.sub(r"\d\d:\d\d:\d\d", "TIME", problems) == problem


def test_probes_that_fail_while_a_pod_starts_are_not_reported(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    api.add_pod("twice-0", deployment["spec"]["template"]["metadata"]["labels"], {"phase": "Pending"})
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "twice-0.1"}, "type": "Warning"}
    about = {"involvedObject": {"kind": "Pod", "name": "twice-0"}, "lastTimestamp": EARLIER}
    api.add({**event, **about, "reason": "Unhealthy", "message": "Startup probe failed: connection refused"})
    assert fast_polling_cluster().pod_problems(deployment) == []


def test_an_exceeded_progress_deadline_ends_the_wait(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    exceeded = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "too slow"}
    api.statuses["Deployment"] = {"observedGeneration": 1, "conditions": [exceeded]}
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    with pytest.raises(StageError, match="too slow"):
        cluster.wait(objects, 600, print)


def test_an_object_made_meanwhile_under_the_same_name_is_left(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    path = "/apis/apps/v1/namespaces/default/deployments/twice"

    def made_again(request: ApiRequest) -> bool:
        if request.method == "DELETE":
            other = api.store.delete(path)
            api.store.create(path, {**other, "metadata": {**other["metadata"], "uid": ""}})
        return False

    api.faults.append(Fault(made_again))
    with pytest.raises(StageError, match="the UID in the precondition"):
        cluster.delete(deployment)
    assert path in api.objects


def test_a_service_is_reached_through_the_api_server(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": "d"}, {"path": path, "body": body})
    cluster = fast_polling_cluster()
    cluster.apply(objects, print)
    status, headers, raw = cluster.send("services/twice:http", "/v1/models/twice:predict", {"a": 1})
    assert (status, headers["x-bundle-digest"]) == (200, "d")
    assert raw == b'{"path": "/v1/models/twice:predict", "body": {"a": 1}}'
    assert cluster.send("services/twice:http", "/v2/health/ready")[0] == 200
    assert cluster.send("services/thrice:http", "/")[0] == 404


def test_the_kubernetes_client_is_imported_only_to_connect() -> None:
    script = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "import k8s.deploy, k8s.objects.training\n"
        "from k8s.cluster.cluster import Cluster\n"
        "Cluster.connect('', 'default')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "the module `kubernetes` is not installed; to fix it: pip install 'pipe-road[cluster]'" in done.stderr
