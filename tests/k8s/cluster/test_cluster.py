from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster, Lease
from k8s.deploy import deploy
from k8s.objects import serving
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ResourceError, StageError

from ..api_server import ApiServer
from ..conftest import Configure

IMAGE = "twice:1"


def quick() -> Cluster:
    """Polls faster than people need."""
    cluster = Cluster.connect("")
    return Cluster(cluster.connection, cluster.version, poll_seconds=0.01)


@pytest.fixture
def objects(configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    return serving.objects(configure(), bundle, IMAGE)


@pytest.fixture
def kserve(configure: Configure, bundle: Bundle, api: ApiServer) -> list[dict[str, Any]]:
    api.crds.add("serving.kserve.io/v1beta1")
    return serving.objects(configure({"mode": "inferenceservice"}), bundle, IMAGE)


def test_connecting_names_the_context_and_the_server(api: ApiServer) -> None:
    assert Cluster.connect("").describe() == f"context small, server {api.url}, Kubernetes v1.37.0"
    assert Cluster.connect("small").context == "small"


@pytest.mark.usefixtures("no_cluster")
def test_without_a_kubeconfig_it_says_what_to_set() -> None:
    with pytest.raises(ResourceError, match="set KUBECONFIG"):
        Cluster.connect("")


def test_an_unknown_context_is_named(api: ApiServer) -> None:
    with pytest.raises(ResourceError, match="elsewhere"):
        Cluster.connect("elsewhere")


def test_a_server_that_is_gone_is_named(api: ApiServer, tmp_path: Path) -> None:
    server = ApiServer()
    server.close()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(ResourceError, match=f"{server.url}.*does not answer"):
        Cluster.connect("")


def test_wrong_credentials_are_not_taken_for_a_missing_cluster(api: ApiServer, tmp_path: Path) -> None:
    api.write_kubeconfig(tmp_path / "kubeconfig", token="stolen")
    with pytest.raises(ResourceError, match="refuses us \\(401\\): Unauthorized"):
        Cluster.connect("")


@pytest.mark.parametrize("text", ["", "a: [", "apiVersion: v1\nkind: Config\n"])
def test_a_damaged_kubeconfig_is_named(text: str, api: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(ResourceError, match="kubeconfig"):
        Cluster.connect("")


def test_apply_is_server_side_strict_and_in_our_name(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    applied = quick().apply(objects, "default", print)
    assert applied[0] == "serviceaccount/twice"
    assert len(api.objects) == len(objects) == len(applied)
    patches = [(query, kind) for method, _, query, kind in api.requests if method == "PATCH"]
    expected = {"fieldManager": "pipe", "fieldValidation": "Strict"}
    assert patches[-1] == (expected, "application/apply-patch+yaml")


def test_a_refusal_leaves_nothing_half_applied(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    objects[-1]["spec"]["minAvialable"] = 1
    with pytest.raises(StageError, match=r"poddisruptionbudget/twice: the cluster refused it .*minAvialable"):
        quick().apply(objects, "default", print)
    assert api.objects == {}


def test_a_missing_namespace_is_named(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    with pytest.raises(StageError, match='namespaces "models" not found'):
        quick().apply(objects, "models", print)


def test_warnings_of_the_api_are_said_aloud(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    said: list[str] = []
    api.warning = 'would violate PodSecurity, says \\"somebody\\"'
    quick().apply(objects[:1], "default", said.append)
    assert said[1:] == ['warning: serviceaccount/twice: would violate PodSecurity, says "somebody"']


def test_a_cluster_without_kserve_is_told_apart(api: ApiServer, kserve: list[dict[str, Any]]) -> None:
    api.crds.clear()
    with pytest.raises(StageError, match=r"install KServe .*, or set deploy\.mode=deployment"):
        quick().apply(kserve, "default", print)


def test_waiting_ends_when_the_deployment_is_rolled_out(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    said: list[str] = []
    cluster = quick()
    cluster.apply(objects, "default", print)
    cluster.wait(objects, "default", 10, said.append)
    assert said == [
        "deployment/twice: 0 of 1 updated replicas available",
        "deployment/twice: 1 replicas available",
    ]


def test_waiting_survives_a_busy_api_server(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    said: list[str] = []
    cluster = quick()
    cluster.apply(objects, "default", print)
    api.fail("GET", "/deployments/", status=503)
    api.fail("GET", "/deployments/", status=429)
    cluster.wait(objects, "default", 10, said.append)
    assert said[0] == "deployment/twice: the API server answers 503"
    assert said[-1] == "deployment/twice: 1 replicas available"


def test_waiting_for_kserve_ends_with_its_ready_condition(api: ApiServer, kserve: list[dict[str, Any]]) -> None:
    said: list[str] = []
    cluster = quick()
    cluster.apply(kserve, "default", print)
    cluster.wait(kserve, "default", 10, said.append)
    assert said == ["inferenceservice/twice: Ready: pods start", "inferenceservice/twice: ready"]


def test_kserve_is_not_believed_while_its_deployment_runs_another_bundle(
    api: ApiServer, kserve: list[dict[str, Any]], objects: list[dict[str, Any]]
) -> None:
    cluster = quick()
    old = next(item for item in objects if item["kind"] == "Deployment")
    old["metadata"]["name"] = "twice-predictor"
    old["spec"]["template"]["metadata"]["annotations"]["pipe-road/bundle"] = "0" * 64
    cluster.apply([*kserve, old], "default", print)
    with pytest.raises(StageError, match="has not taken over the new version"):
        cluster.wait(kserve, "default", 1, print)


WAITING = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "twice:1"'}
CRASHED = {
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 2, "message": "bundle damaged\n"}},
}
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"phase": "Pending", "containerStatuses": [{"state": {"waiting": WAITING}}]}, "ImagePullBackOff: Back-off"),
        ({"phase": "Running", "containerStatuses": [CRASHED]}, "CrashLoopBackOff: .*exit code 2, bundle damaged"),
        ({"phase": "Pending", "conditions": [UNSCHEDULED]}, "Pending: 0/3 nodes: insufficient nvidia.com/gpu"),
    ],
)
def test_a_roll_out_that_hangs_names_the_reason_its_pods_give(
    status: dict[str, Any], reason: str, api: ApiServer, objects: list[dict[str, Any]]
) -> None:
    deployment = next(item for item in objects if item["kind"] == "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    api.add_pod("twice-abc", labels, status)
    api.unready_polls = 10**6
    cluster = quick()
    cluster.apply(objects, "default", print)
    with pytest.raises(StageError, match=f"twice-abc: {reason}"):
        cluster.wait(objects, "default", 0.1, print)


def test_a_passed_progress_deadline_is_not_waited_out(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    exceeded = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "too slow"}
    api.statuses["Deployment"] = {"observedGeneration": 1, "conditions": [exceeded]}
    cluster = quick()
    cluster.apply(objects, "default", print)
    with pytest.raises(StageError, match="too slow"):
        cluster.wait(objects, "default", 600, print)


def test_a_service_is_asked_through_the_api_server(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    api.service = lambda path, body: (200, {"x-bundle-digest": "d"}, {"path": path, "body": body})
    cluster = quick()
    cluster.apply(objects, "default", print)
    status, headers, raw = cluster.post("default", "twice", "http", "/v1/models/twice:predict", {"a": 1})
    assert (status, headers["x-bundle-digest"]) == (200, "d")
    assert raw == b'{"path": "/v1/models/twice:predict", "body": {"a": 1}}'
    assert cluster.get("default", "twice", "http", "/v2/health/ready")[0] == 200
    assert cluster.get("default", "thrice", "http", "/")[0] == 404


def test_importing_k8s_needs_no_kubernetes_client() -> None:
    script = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "import k8s.deploy, k8s.objects.training\n"
        "from k8s.cluster.cluster import Cluster\n"
        "Cluster.connect('')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ResourceError: the Kubernetes client is not installed; `pip install kubernetes`" in done.stderr


PLACE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/twice-deploy"


@pytest.fixture
def lease(api: ApiServer) -> Callable[..., Lease]:
    def make(holder: str, seconds: int = 30) -> Lease:
        return Lease(connect(""), "default", "twice-deploy", holder, poll_seconds=0.01, lasts_seconds=seconds)

    return make


def test_whoever_comes_second_is_told_who_deploys(lease: Callable[..., Lease]) -> None:
    said: list[str] = []
    with (
        lease("ann on a").held(0, print),
        pytest.raises(ResourceError, match="ann on a is deploying twice in namespace default"),
        lease("bob on b").held(0.05, said.append),
    ):
        pass
    assert said == ["ann on a is deploying here; waiting for it, 0.05 s at most"]


def test_whoever_waits_goes_on_when_the_first_is_through(lease: Callable[..., Lease]) -> None:
    first_is_through = threading.Event()
    waits = threading.Event()

    def first() -> None:
        with lease("ann on a").held(0, print):
            held.set()
            waits.wait(10)
        first_is_through.set()

    held = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    with lease("bob on b").held(10, lambda text: waits.set()):
        assert first_is_through.wait(10)
    thread.join()


def test_one_who_died_is_waited_for_no_longer_than_a_lease_lasts(lease: Callable[..., Lease]) -> None:
    dead = lease("ann on a", seconds=1)
    dead._take(0, print)
    with lease("bob on b").held(10, print) as check:
        check()


def test_a_lease_that_is_renewed_is_not_taken(lease: Callable[..., Lease]) -> None:
    with (
        lease("ann on a", seconds=1).held(0, print) as check,
        pytest.raises(ResourceError, match="ann on a"),
        lease("bob on b").held(1.5, print),
    ):
        pass
    check()


def until_it_raises(check: Callable[[], None]) -> None:
    for _ in range(500):
        check()
        threading.Event().wait(0.01)


def test_one_that_lost_its_lease_changes_nothing_more(lease: Callable[..., Lease], api: ApiServer) -> None:
    with lease("ann on a", seconds=1).held(0, print) as check:
        api.store.change(PLACE, lambda item: item["spec"].update(holderIdentity="bob on b"))
        with pytest.raises(ResourceError, match="somebody else took it; nothing more is changed"):
            until_it_raises(check)
    assert api.objects[PLACE]["spec"]["holderIdentity"] == "bob on b"


def test_a_deployment_waits_for_another_and_says_for_whom(
    api: ApiServer, lease: Callable[..., Lease], configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    config = configure()
    quick = config.model_copy(update={"rollout": config.rollout.model_copy(update={"wait_seconds": 0})})
    with lease("ann on a").held(0, print), pytest.raises(ResourceError, match="ann on a is deploying twice"):
        deploy(quick, bundle, "twice:1", tmp_path, False, print)
    assert not [path for path in api.objects if "/deployments/" in path]


def test_a_lease_that_cannot_be_given_back_hides_no_other_error(lease: Callable[..., Lease], api: ApiServer) -> None:
    said: list[str] = []

    def fail() -> None:
        with lease("ann on a").held(0, said.append):
            api.rules = []
            raise ValueError("the real one")

    with pytest.raises(ValueError, match="the real one"):
        fail()
    assert said[0].startswith("warning: lease/twice-deploy runs out by itself, in 30 s: ")
