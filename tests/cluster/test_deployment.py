"""Deployments on nodes: roll-outs, canaries and disruptions under load, and the causes of those that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from k8s.cluster.canary import canary_name
from k8s.objects.manifests import BUNDLE_ANNOTATION
from pipeline.system.errors import StageError

from .images import NAME
from .load import send_load
from .place import DEPLOYMENT, Place, Reports, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("image")]

# Few requests suffice for this margin: how many there are depends on the machine.
CANARY = {"canary_percent": 30, "auto": True, "observe_seconds": 10, "min_requests": 10, "margin": 0.5}


def serving_bundle(place: Place) -> str:
    live = place.cluster.read(DEPLOYMENT)
    assert live is not None
    return str(live["metadata"]["annotations"][BUNDLE_ANNOTATION])


def has_canary(place: Place) -> bool:
    item = {**DEPLOYMENT, "metadata": {"name": canary_name(NAME)}}
    return place.cluster.read(item) is not None


def test_deployment_answers_and_repeats_without_a_change(place: Place, reports: Reports) -> None:
    assert place.deploy("stable", reports)["golden"]["requests"] == 2
    place.deploy("stable", reports)
    assert "plan: nothing changes" in reports.lines


def test_rollout_and_rollback_under_load_lose_no_request(place: Place, reports: Reports) -> None:
    place.deploy("stable", reports)
    with send_load(place) as load:
        for version in ("candidate", "stable"):
            place.deploy(version, reports)
            assert serving_bundle(place) == place.bundles[version].digest
        load.check()


def test_good_canary_is_promoted_under_load(place: Place, reports: Reports) -> None:
    """Replace a slow version: equal ones differ by chance on a busy machine."""
    place.deploy("slow", reports)
    with send_load(place) as load:
        record = place.deploy("candidate", reports, place.config(rollout=CANARY))
        load.check()
    assert record["canary"] is None
    assert serving_bundle(place) == place.bundles["candidate"].digest
    assert not has_canary(place)


def test_slow_canary_is_rolled_back_under_load(place: Place, reports: Reports) -> None:
    place.deploy("stable", reports)
    with send_load(place) as load:
        with pytest.raises(StageError, match="the canary was rolled back"):
            place.deploy("slow", reports, place.config(rollout=CANARY))
        load.check()
    assert serving_bundle(place) == place.bundles["stable"].digest
    assert not has_canary(place)


def test_deleted_pod_is_replaced_without_a_lost_request(place: Place, reports: Reports) -> None:
    place.deploy("stable", reports)
    with send_load(place) as load:
        before = {pod["metadata"]["name"] for pod in place.pods()}
        place.delete_pod(min(before))
        wait_until(lambda: bool({pod["metadata"]["name"] for pod in place.pods()} - before), "a new pod")
        place.wait_for_replicas(2, reports)
        load.check()


def test_disruption_budget_allows_one_eviction_at_a_time(place: Place, reports: Reports, nodes: list[str]) -> None:
    place.deploy("stable", reports)
    first, second = sorted(pod["metadata"]["name"] for pod in place.pods())
    with send_load(place) as load:
        with cordon(place, nodes):  # no new pod can take the first one's place
            wait_until(lambda: place.evict(first) == 201, "the first eviction")
            assert place.evict(second) == 429
        wait_until(lambda: place.evict(second) == 201, "the second eviction")
        place.wait_for_replicas(2, reports)
        load.check()


def test_drained_node_moves_pods_without_a_lost_request(place: Place, reports: Reports, nodes: list[str]) -> None:
    """Leave the node that the load comes from, and drain the other one."""
    if len(nodes) < 2:
        pytest.skip("needs two nodes")
    place.deploy("stable", reports)
    with send_load(place) as load:
        load_node = place.cluster.connection.request("GET", f"/api/v1/namespaces/{place.namespace}/pods/load").json()
        drained = next(node for node in nodes if node != load_node["spec"]["nodeName"])
        with cordon(place, [drained]):
            for pod in [pod for pod in place.pods() if pod["spec"].get("nodeName") == drained]:
                name = pod["metadata"]["name"]
                wait_until(lambda name=name: place.evict(name) == 201, f"the eviction of {name}")  # type: ignore[misc]
            place.wait_for_replicas(2, reports)
            assert drained not in {pod["spec"].get("nodeName") for pod in place.pods()}  # a pending pod has none
        load.check()


@contextlib.contextmanager
def cordon(place: Place, nodes: list[str]) -> Iterator[None]:
    try:
        for node in nodes:
            set_unschedulable(place, node, True)
        yield
    finally:
        for node in nodes:
            set_unschedulable(place, node, False)


def set_unschedulable(place: Place, node: str, unschedulable: bool) -> None:
    body = b'{"spec": {"unschedulable": %s}}' % (b"true" if unschedulable else b"null")
    content_type = "application/merge-patch+json"
    path = f"/api/v1/nodes/{node}"
    assert place.cluster.connection.request("PATCH", path, body=body, content_type=content_type).ok


def test_memory_limit_is_named_as_the_cause(place: Place, reports: Reports) -> None:
    config = place.config({"memory": "32Mi", "timeout_seconds": 60})
    with pytest.raises(StageError, match="it needs more memory than its limit"):
        place.deploy("stable", reports, config)


def test_failed_rollout_leaves_the_old_version_serving(place: Place, reports: Reports) -> None:
    place.deploy("stable", reports)
    with send_load(place) as load:
        with pytest.raises(StageError, match="`pipe registry rollback`"):
            place.deploy("candidate", reports, place.config({"memory": "32Mi", "timeout_seconds": 60}))
        load.check()
        place.deploy("stable", reports)


def test_image_that_cannot_be_pulled_is_named_as_the_cause(
    place: Place, reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "image_of", lambda self, version: "registry.invalid/twice:0123456789ab")
    with pytest.raises(StageError, match=r"ErrImagePull|ImagePullBackOff"):
        place.deploy("stable", reports, place.config({"timeout_seconds": 90}))
