"""Each version keeps its ConfigMap and Secret, as long as there is something to roll back to."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster.cluster import Cluster
from k8s.cluster.garbage_collection import delete_unused_configuration
from pipeline.contract.bundle import Bundle
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import ResourceError, StageError

from ..api_server import ApiServer, Response
from ..conftest import Configure
from .test_canary import OLD, counting_pods, wrong_answers

Model = Callable[[str, Any], Response]


@pytest.fixture
def cluster(api: ApiServer, model: Model, no_observation: None) -> ApiServer:
    api.unready_polls, api.nodes.replicas, api.service, api.pod = 0, 3, model, counting_pods(model)
    return api


@pytest.fixture
def roll_out(cluster: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path) -> Callable[..., list[str]]:
    def run(log_requests: float, key: str = "", canary: Rollout | None = None) -> list[str]:
        reports: list[str] = []
        (tmp_path / "keys").write_text(f"{key}\n")
        access = Access(api_keys=str(tmp_path / "keys")) if key else Access()
        config = configure(serve={"log_requests": log_requests})
        config = config.model_copy(update={"rollout": canary or Rollout()})
        deploy.deploy(config, bundle, "twice:1", tmp_path / "out", False, reports.append, access)
        return reports

    return run


def names(api: ApiServer, kind: str) -> list[str]:
    return sorted(item["metadata"]["name"] for item in api.objects.values() if item["kind"] == kind)


def configuration(api: ApiServer, owner: str) -> tuple[str, str]:
    """Return the share of logged requests and the keys that the pods of a Deployment or ReplicaSet have."""
    kinds = ("Deployment", "ReplicaSet")
    item = next(item for item in api.objects.values() if item["kind"] in kinds and item["metadata"]["name"] == owner)
    pod = item["spec"]["template"]["spec"]
    core = "/api/v1/namespaces/default"
    config_map = api.objects[f"{core}/configmaps/{pod['containers'][0]['envFrom'][0]['configMapRef']['name']}"]
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    keys = [base64.b64decode(api.objects[f"{core}/secrets/{name}"]["data"]["api-keys"]).decode() for name in secrets]
    assert config_map["immutable"]
    return config_map["data"]["LOG_REQUESTS"], "".join(keys)


def test_old_pods_and_an_undo_have_the_options_and_keys_of_their_version(
    cluster: ApiServer, roll_out: Callable[..., list[str]]
) -> None:
    roll_out(0.1, "a")
    (first,) = names(cluster, "ReplicaSet")
    before = configuration(cluster, first)
    roll_out(0.2, "b")
    assert configuration(cluster, first) == before
    assert configuration(cluster, "twice")[0] == "0.2"
    assert configuration(cluster, "twice")[1] != before[1]


def test_configurations_are_deleted_with_the_last_version_that_can_be_restored(
    cluster: ApiServer, roll_out: Callable[..., list[str]]
) -> None:
    for i in range(8):
        reports = roll_out(i / 20, f"key-{i // 4}")
    replica_sets = names(cluster, "ReplicaSet")
    assert len(replica_sets) == 6, "one serves, and revisionHistoryLimit is 5"
    kept = {configuration(cluster, name) for name in replica_sets}
    assert {share for share, _ in kept} == {"0.1", "0.15", "0.2", "0.25", "0.3", "0.35"}
    assert (len(names(cluster, "ConfigMap")), len(names(cluster, "Secret"))) == (6, 2)
    assert [line for line in reports if line.startswith("deleted configmap/twice-options-")]
    for i in range(8, 13):
        reports = roll_out(i / 20)
    assert (len(names(cluster, "ConfigMap")), len(names(cluster, "Secret"))) == (6, 1)
    assert not any(line.startswith("deleted secret/") for line in reports)
    reports = roll_out(0.9)
    assert names(cluster, "Secret") == []
    assert [line for line in reports if line.startswith("deleted secret/twice-access-")]


def test_the_same_configuration_has_the_same_name(cluster: ApiServer, roll_out: Callable[..., list[str]]) -> None:
    roll_out(0.1, "a")
    before = names(cluster, "ConfigMap") + names(cluster, "Secret")
    roll_out(0.2, "a")
    roll_out(0.1, "a")
    assert len(names(cluster, "Secret")) == 1
    assert set(before) < set(names(cluster, "ConfigMap") + names(cluster, "Secret"))


def test_a_canary_has_its_own_options_and_keys(cluster: ApiServer, roll_out: Callable[..., list[str]]) -> None:
    roll_out(0.1)
    stable = configuration(cluster, "twice")
    roll_out(0.2, "a", canary=Rollout(canary_percent=25))
    assert (configuration(cluster, "twice"), stable) == (("0.1", ""), ("0.1", ""))
    share, keys = configuration(cluster, "twice-canary")
    assert share == "0.2"
    assert keys.startswith("sha256:")
    delete_unused_configuration(Cluster.connect("", "default"), "twice", "", print, lambda: None)
    assert configuration(cluster, "twice-canary") == (share, keys), "they are in use as long as its Deployment exists"
    roll_out(0.2, "a")
    assert configuration(cluster, "twice") == (share, keys), "the evaluated canary gets all requests"


@pytest.mark.parametrize("ended_by", ["pipe", "a person"])
def test_a_canary_that_ends_leaves_no_configuration(
    ended_by: str, cluster: ApiServer, roll_out: Callable[..., list[str]], configure: Configure
) -> None:
    roll_out(0.1, "a")
    before = names(cluster, "ConfigMap") + names(cluster, "Secret")
    canary = Rollout(canary_percent=25)
    if ended_by == "pipe":
        cluster.pod = wrong_answers
        with pytest.raises(StageError, match="what runs is not what was evaluated"):
            roll_out(0.2, "b", canary=canary)
    else:
        roll_out(0.2, "b", canary=canary)
        assert len(names(cluster, "ConfigMap")) == 2
        deploy.end_canary(configure(), print)
    assert names(cluster, "ConfigMap") + names(cluster, "Secret") == before


def test_a_canary_may_introduce_tls(cluster: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path) -> None:
    for name in ("crt", "key"):
        (tmp_path / name).write_text(name)
    access = Access(tls_certificate=str(tmp_path / "crt"), tls_key=str(tmp_path / "key"))
    model, cluster.service = cluster.service, lambda path, body: (200, {"x-bundle-digest": OLD}, model(path, body)[2])
    deploy.deploy(configure(), replace(bundle, digest=OLD), "twice:1", tmp_path / "old", False, print)
    cluster.service = model
    config = configure().model_copy(update={"rollout": Rollout(canary_percent=25, auto=True, observe_seconds=1)})
    deploy.deploy(config, bundle, "twice:2", tmp_path / "new", False, print, access)
    pods = {path.split("/pods/")[1].split("/")[0] for _, path, _, _ in cluster.requests if path.endswith("/metrics")}
    assert {"twice-0:8080", "https:twice-canary-0:8080"} <= pods
    assert "https:twice-0:8080" not in pods


def test_a_key_that_the_stable_version_refuses_is_named(
    cluster: ApiServer, roll_out: Callable[..., list[str]], model: Model
) -> None:
    roll_out(0.1, "a")
    pods = counting_pods(model)
    cluster.pod = lambda pod, path, body: (
        (401, {}, {}) if path == "/metrics" and "canary" not in pod else pods(pod, path, body)
    )
    with pytest.raises(StageError, match="does not accept our API key; a canary needs one that both versions accept"):
        roll_out(0.2, "b", canary=Rollout(canary_percent=25, auto=True, observe_seconds=1))


def test_a_role_without_the_right_to_list_leaves_a_good_deployment(
    cluster: ApiServer, roll_out: Callable[..., list[str]]
) -> None:
    cluster.fail("GET", "/replicasets", status=403)
    reports = roll_out(0.1)
    assert any(line.startswith("warning: unused ConfigMaps and Secrets are left") for line in reports)


def test_nothing_is_deleted_once_another_deployment_has_started(
    cluster: ApiServer, roll_out: Callable[..., list[str]]
) -> None:
    def lost() -> None:
        raise ResourceError("another process took it")

    roll_out(0.1)
    cluster.store.delete("/apis/apps/v1/namespaces/default/deployments/twice")
    cluster.nodes.on_delete("/apis/apps/v1/namespaces/default/deployments/twice")
    reports: list[str] = []
    delete_unused_configuration(Cluster.connect("", "default"), "twice", "", reports.append, lost)
    assert len(names(cluster, "ConfigMap")) == 1
    assert reports == ["warning: unused ConfigMaps and Secrets are left: another process took it"]
    delete_unused_configuration(Cluster.connect("", "default"), "twice", "", reports.append, lambda: None)
    assert names(cluster, "ConfigMap") == []


def test_a_config_map_of_another_owner_stays(cluster: ApiServer, roll_out: Callable[..., list[str]]) -> None:
    labels = {"app.kubernetes.io/name": "twice", "app.kubernetes.io/component": "serving"}
    metadata = {"name": "twice-options", "labels": labels}
    cluster.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}})
    roll_out(0.1)
    assert "twice-options" in names(cluster, "ConfigMap")
