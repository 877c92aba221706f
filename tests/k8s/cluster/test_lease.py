"""The lease of a deployment: exclusive, renewed, expiring, lost and released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster
from k8s.cluster.lease import Lease
from k8s.cluster.smoke import Expected
from k8s.deploy import Deployer, deploy, read_versions, roll_back
from k8s.objects.serving import serving_objects
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.access import OPEN_ACCESS
from pipeline.system.errors import ResourceError

from ..api_requests import ApiRequest
from ..api_server import ApiServer, Fault, Response
from ..conftest import Configure

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/twice-deploy"


@pytest.fixture
def lease(api: ApiServer) -> Callable[..., Lease]:
    def make(holder: str, seconds: int = 30) -> Lease:
        return Lease(
            connect(""),
            "default",
            "twice-deploy",
            holder,
            poll_seconds=0.01,
            duration_seconds=seconds,
            renew_seconds=0.01,
        )

    return make


def test_the_second_deployment_learns_who_holds_the_lease(lease: Callable[..., Lease]) -> None:
    reports: list[str] = []
    with (
        lease("ann on a").hold(0, print),
        pytest.raises(ResourceError, match="ann on a is deploying twice in namespace default"),
        lease("bob on b").hold(0.05, reports.append),
    ):
        pass
    assert reports == ["ann on a is deploying here; waiting for it, 0.05 s at most"]


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_only_one_of_two_concurrent_deployments_gets_the_lease(
    method: str, lease: Callable[..., Lease], api: ApiServer
) -> None:
    if method == "PUT":
        with lease("cid on c").hold(0, print):
            pass

    def be_faster(request: ApiRequest) -> bool:
        if request.method == method and "/leases" in request.path:
            api.faults.clear()
            lease("ann on a")._acquire(0, print)
        return False

    api.faults.append(Fault(be_faster))
    with pytest.raises(ResourceError, match="ann on a is deploying twice"), lease("bob on b").hold(0, print):
        pass
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "ann on a"


def test_a_waiting_deployment_continues_when_the_lease_is_free(lease: Callable[..., Lease]) -> None:
    first_has_finished = threading.Event()
    second_waits = threading.Event()

    def first() -> None:
        with lease("ann on a").hold(0, print):
            held.set()
            second_waits.wait(10)
        first_has_finished.set()

    held = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    held.wait(10)
    with lease("bob on b").hold(10, lambda text: second_waits.set()):
        assert first_has_finished.wait(10)
    thread.join()


def test_the_lease_of_a_dead_process_expires(lease: Callable[..., Lease]) -> None:
    expired = lease("ann on a", seconds=1)
    expired._acquire(0, print)
    with lease("bob on b").hold(10, print) as check:
        check()


def test_a_renewed_lease_does_not_expire(lease: Callable[..., Lease]) -> None:
    with (
        lease("ann on a", seconds=1).hold(0, print) as check,
        pytest.raises(ResourceError, match="ann on a"),
        lease("bob on b").hold(1.5, print),
    ):
        pass
    check()


def call_until_it_raises(check: Callable[[], None]) -> None:
    for _ in range(500):
        check()
        threading.Event().wait(0.01)


def test_a_deployment_that_lost_its_lease_changes_nothing_more(lease: Callable[..., Lease], api: ApiServer) -> None:
    with lease("ann on a", seconds=1).hold(0, print) as check:
        api.store.change(LEASE, lambda item: item["spec"].update(holderIdentity="bob on b"))
        with pytest.raises(ResourceError, match="another process took it; nothing more is changed"):
            call_until_it_raises(check)
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "bob on b"


def test_a_lease_that_could_not_be_renewed_in_time_is_lost(lease: Callable[..., Lease], api: ApiServer) -> None:
    with lease("ann on a", seconds=1).hold(0, print) as check:
        api.rules = []
        with pytest.raises(ResourceError, match="nothing more is changed"):
            call_until_it_raises(check)


def test_a_canary_is_not_ended_while_a_deployment_runs(
    api: ApiServer, lease: Callable[..., Lease], configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k8s.deploy.LEASE_TIMEOUT_SECONDS", 0)
    metadata = {"name": "twice-canary"}
    path = api.add({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {}})
    with lease("ann on a").hold(0, print), pytest.raises(ResourceError, match="ann on a is deploying twice"):
        roll_back(configure(), OPEN_ACCESS, print, lambda version: None)
    assert path in api.objects


def test_a_deployment_does_not_start_while_another_runs(
    api: ApiServer,
    lease: Callable[..., Lease],
    configure: Configure,
    bundle: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("k8s.deploy.LEASE_TIMEOUT_SECONDS", 0)
    with lease("ann on a").hold(0, print), pytest.raises(ResourceError, match="ann on a is deploying twice"):
        deploy(configure(), bundle, "twice:1", tmp_path, False, print)
    assert not [path for path in api.objects if "/deployments/" in path]


def test_a_deployment_checks_its_lease_before_it_applies(
    api: ApiServer, model: Callable[[str, Any], Response], configure: Configure, bundle: Bundle
) -> None:
    def lost() -> None:
        raise ResourceError("another process took it")

    api.service, api.unready_polls, config = model, 0, configure()
    objects = serving_objects(config, bundle, "twice:1")
    cluster = Cluster.connect("", "default")
    version = read_versions(cluster, config).begin(objects, run="", bundle=bundle.digest, image="twice:1")
    late = Deployer(config, OPEN_ACCESS, cluster, print, lost)
    with pytest.raises(ResourceError, match="another process took it"):
        late.deploy(version, Expected.from_bundle(bundle, bundle.digest))
    assert api.objects == {}


def test_failed_release_does_not_hide_another_error(lease: Callable[..., Lease], api: ApiServer) -> None:
    reports: list[str] = []

    def fail() -> None:
        with lease("ann on a").hold(0, reports.append):
            api.rules = []
            raise ValueError("the real one")

    with pytest.raises(ValueError, match="the real one"):
        fail()
    assert reports[0].startswith("warning: lease/twice-deploy expires by itself, in 30 s: ")
