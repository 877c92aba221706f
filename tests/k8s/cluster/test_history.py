"""Versions of a service on its cluster: what is recorded, restored, and deleted with the last version that has it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster.cluster import Cluster, describe_changes
from k8s.cluster.drift import inspect_deployment
from k8s.cluster.history import VERSIONS_KEPT, History, delete_unused
from pipeline.contract.bundle import Bundle
from pipeline.contract.config import Config, parse_config
from pipeline.contract.settings.access import Access
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import ConfigError, ResourceError, StageError

from ..api_server import ApiServer, Response
from ..conftest import Configure
from ..objects.test_jobs import monitored
from .test_canary import OLD, counting_pods, wrong_answers

Model = Callable[[str, Any], Response]
DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/twice"
CRON_JOB = "/apis/batch/v1/namespaces/default/cronjobs/twice-monitor"
ROUTE = "/apis/gateway.networking.k8s.io/v1/namespaces/default/httproutes/twice"


@pytest.fixture
def cluster(api: ApiServer, model: Model, no_observation: None) -> ApiServer:
    api.unready_polls, api.nodes.replicas, api.service, api.pod = 0, 3, model, counting_pods(model)
    api.crds.add("gateway.networking.k8s.io/v1")
    return api


RollOut = Callable[..., list[str]]


@pytest.fixture
def roll_out(cluster: ApiServer, configure: Configure, bundle: Bundle, tmp_path: Path) -> RollOut:
    def run(log_requests: float, key: str = "", canary: Rollout | None = None, **settings: Any) -> list[str]:
        reports: list[str] = []
        (tmp_path / "keys").write_text(f"{key}\n")
        access = Access(api_keys=str(tmp_path / "keys")) if key else Access()
        config = configure(settings, serve={"log_requests": log_requests})
        config = config.model_copy(update={"rollout": canary or Rollout()})
        deploy.deploy(config, bundle, "twice:1", tmp_path / "out", False, reports.append, access)
        return reports

    return run


@pytest.fixture
def roll_back(cluster: ApiServer, configure: Configure, bundle: Bundle) -> Callable[..., Any]:
    def run(number: int | None = None) -> Any:
        return deploy.roll_back(configure(), Access(), print, lambda version: bundle, number)

    return run


def history() -> History:
    config = parse_config({"name": "twice", "task": "task.py:T", "codec": "codec.py:C"}, source="test")
    return deploy.read_versions(Cluster.connect("", "default"), config)


def live_options(api: ApiServer) -> str:
    return configuration(api, "twice")[0]


def test_each_rollback_goes_one_version_back_until_none_is_left(
    cluster: ApiServer, roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    for share in (0.1, 0.2, 0.3):
        roll_out(share)
    assert [roll_back()[0].number, live_options(cluster)] == [2, "0.2"]
    assert [roll_back()[0].number, live_options(cluster)] == [1, "0.1"], "and not to the version that was rolled back"
    with pytest.raises(ConfigError, match=r"no previous version.* \(recorded on the cluster: 1, 2, 3\)"):
        roll_back()
    assert [roll_back(3)[0].number, live_options(cluster)] == [3, "0.3"]
    with pytest.raises(ConfigError, match="twice has no version 7"):
        roll_back(7)


def test_a_version_after_a_rollback_replaces_the_restored_one(roll_out: RollOut, roll_back: Callable[..., Any]) -> None:
    for share in (0.1, 0.2):
        roll_out(share)
    roll_back()
    roll_out(0.3)
    assert [version.number for version in history().restorable()] == [1]


def test_the_same_objects_are_no_new_version_and_the_same_pods_are_passed_over(
    roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    roll_out(0.1)
    roll_out(0.2)
    roll_out(0.2)
    assert sorted(history().versions) == [1, 2]
    roll_out(0.2, max_replicas=9)
    assert sorted(history().versions) == [1, 2, 3]
    assert roll_back()[0].number == 1


def test_a_record_names_what_was_deployed(roll_out: RollOut, bundle: Bundle) -> None:
    roll_out(0.1)
    current = history().current
    assert current is not None
    assert (current.bundle, current.image, current.state, current.after) == (bundle.digest, "twice:1", "served", 0)
    assert current.since
    assert "@" in current.by


def test_an_undo_by_kubectl_is_recognized_and_the_next_deployment_replaces_it(
    cluster: ApiServer, roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    roll_out(0.1)
    before = cluster.objects[DEPLOYMENT]
    roll_out(0.2)
    annotations = before["metadata"]["annotations"]
    undone = {
        **{name: before[name] for name in ("apiVersion", "kind")},
        "metadata": {"name": "twice", "annotations": annotations},
        "spec": {"template": before["spec"]["template"]},
    }
    cluster.store.apply(DEPLOYMENT, undone, "kubectl", force=True)
    current = history().current
    assert current is not None
    assert current.number == 1
    assert inspect_deployment(Cluster.connect("", "default"), history()).drift == ()
    roll_out(0.3)
    assert live_options(cluster) == "0.3"
    assert roll_back()[0].number == 1


def test_what_a_setting_made_is_deleted_when_the_setting_goes(
    cluster: ApiServer, roll_out: RollOut, configure: Configure, bundle: Bundle
) -> None:
    roll_out(0.1, gateway="front")
    assert ROUTE in cluster.objects
    config = configure(serve={"log_requests": 0.1})
    gone = "plan: httproute/twice: deleted, as no setting makes it any more"
    assert gone in describe_changes(deploy.preview(config, bundle, "twice:1", print))
    reports = roll_out(0.1)
    assert gone in reports
    assert "deleted httproute/twice, which no version uses" in reports
    assert ROUTE not in cluster.objects
    assert describe_changes(deploy.preview(config, bundle, "twice:1", print)) == []


def test_the_cron_job_follows_the_version_that_serves(
    cluster: ApiServer, roll_back: Callable[..., Any], configure: Configure, bundle: Bundle, tmp_path: Path
) -> None:
    def roll_out(config: Config, number: int) -> None:
        deploy.deploy(config, bundle, f"twice:{number}", tmp_path, False, print)

    def schedule() -> str:
        return cluster.objects[CRON_JOB]["spec"]["schedule"] if CRON_JOB in cluster.objects else ""

    roll_out(configure(), 1)
    roll_out(monitored(configure, "1h"), 2)
    roll_out(monitored(configure, "2h"), 3)
    assert schedule() == "0 */2 * * *"
    roll_back()
    assert schedule() == "0 */1 * * *"
    assert inspect_deployment(Cluster.connect("", "default"), history()).drift == ()
    roll_back()
    assert schedule() == ""
    roll_out(monitored(configure), 4)
    assert schedule()
    roll_out(configure(), 4)
    assert schedule() == "", "the setting was emptied"


def test_a_route_that_was_left_is_drift_and_one_of_another_owner_is_not(cluster: ApiServer, roll_out: RollOut) -> None:
    roll_out(0.1, gateway="front")
    route = cluster.objects[ROUTE]
    roll_out(0.1)
    cluster.store.apply(ROUTE, {name: route[name] for name in ("apiVersion", "kind", "metadata", "spec")}, "me", True)
    connection = Cluster.connect("", "default")
    left = "httproute/twice is there, and the newest version has none"
    assert left in inspect_deployment(connection, history()).drift
    cluster.store.change(ROUTE, lambda item: item["metadata"].__setitem__("labels", {}))
    assert inspect_deployment(connection, history()).drift == ()


def test_a_rollback_leaves_routes_and_autoscalers_as_they_are(
    cluster: ApiServer, roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    roll_out(0.1, gateway="front")
    roll_out(0.2, max_replicas=9)
    roll_back()
    assert ROUTE not in cluster.objects
    scaler = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers/twice"
    assert cluster.objects[scaler]["spec"]["maxReplicas"] == 9
    assert inspect_deployment(Cluster.connect("", "default"), history()).drift == ()


def test_a_version_that_cannot_be_restored_is_passed_over_by_the_next_rollback(
    cluster: ApiServer, roll_out: RollOut, roll_back: Callable[..., Any], model: Model
) -> None:
    for share in (0.1, 0.2, 0.3):
        roll_out(share)
    cluster.service = lambda path, body: wrong_answers("", path, body)
    with pytest.raises(StageError, match="what runs is not what was evaluated"):
        roll_back()
    cluster.service = model
    assert roll_back()[0].number == 1


def test_an_interrupted_rollback_is_repeated(roll_out: RollOut, roll_back: Callable[..., Any]) -> None:
    for share in (0.1, 0.2, 0.3):
        roll_out(share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8s.cluster.smoke.check_service", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_back()
    assert roll_back()[0].number == 2


def test_a_deployment_that_ended_before_its_pods_changed_is_undone(
    roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    roll_out(0.1)
    roll_out(0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8s.cluster.cluster.apply_object", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_out(0.3)
    unfinished = history().unfinished
    assert unfinished is not None
    assert unfinished.number == 3
    assert roll_back()[0].number == 2
    assert roll_back()[0].number == 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_only_the_newest_versions_are_kept(roll_out: RollOut) -> None:
    for i in range(VERSIONS_KEPT + 2):
        roll_out(i / 20)
    assert sorted(history().versions) == list(range(3, VERSIONS_KEPT + 3))


def test_another_machine_promotes_and_restores_without_the_bundle(
    cluster: ApiServer, roll_out: RollOut, configure: Configure, bundle: Bundle, model: Model
) -> None:
    ready: Response = (200, {"x-bundle-digest": bundle.digest}, {"ready": True})
    cluster.service = lambda path, body: ready if path == "/v2/health/ready" else model(path, body)
    roll_out(0.1)
    roll_out(0.2, canary=Rollout(canary_percent=25))
    with pytest.raises(ConfigError, match=r"the canary is version 2, .* so run other is not promoted"):
        deploy.promote(configure(), Access(), print, lambda version: None, "other")
    reports: list[str] = []
    assert deploy.promote(configure(), Access(), reports.append, lambda version: None).number == 2
    assert any("which is not on this machine, so its answers are not checked" in line for line in reports)
    assert live_options(cluster) == "0.2"
    with pytest.raises(ConfigError, match="twice has no canary in namespace default of small, so nothing is promoted"):
        deploy.promote(configure(), Access(), print, lambda version: None)
    version, canary = deploy.roll_back(configure(), Access(), print, lambda version: None)
    assert version is not None
    assert (version.number, canary) == (1, None)


def test_an_interrupted_canary_stays_and_is_continued(
    cluster: ApiServer, roll_out: RollOut, configure: Configure, bundle: Bundle
) -> None:
    measured = Rollout(canary_percent=25, auto=True, observe_seconds=1)
    roll_out(0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("k8s.cluster.canary.observe", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_out(0.2, canary=measured)
    config = configure()
    assert deploy.find_canary(config) is not None
    with pytest.raises(ConfigError, match="`pipe deploy --watch --canary PERCENT --auto` measures it"):
        deploy.continue_canary(config, Access(), print, lambda version: bundle)
    config = config.model_copy(update={"rollout": measured})
    assert deploy.continue_canary(config, Access(), print, lambda version: bundle).number == 2
    assert (live_options(cluster), deploy.find_canary(config)) == ("0.2", None)


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


def test_old_pods_and_an_undo_have_the_options_and_keys_of_their_version(cluster: ApiServer, roll_out: RollOut) -> None:
    roll_out(0.1, "a")
    (first,) = names(cluster, "ReplicaSet")
    before = configuration(cluster, first)
    roll_out(0.2, "b")
    assert configuration(cluster, first) == before
    assert configuration(cluster, "twice")[0] == "0.2"
    assert configuration(cluster, "twice")[1] != before[1]


def test_configurations_are_deleted_with_the_last_version_that_can_be_restored(
    cluster: ApiServer, roll_out: RollOut
) -> None:
    for i in range(VERSIONS_KEPT):
        reports = roll_out(i / 20, "a key")
    assert not any(line.startswith("deleted") for line in reports)
    for i in range(VERSIONS_KEPT, 2 * VERSIONS_KEPT):
        assert names(cluster, "Secret") != []
        reports = roll_out(i / 20)
        assert [line for line in reports if line.startswith("deleted configmap/twice-options-")]
    kept = [name for name in names(cluster, "ConfigMap") if "-options-" in name]
    assert (len(kept), names(cluster, "Secret")) == (VERSIONS_KEPT, [])
    assert [line for line in reports if line.startswith("deleted secret/twice-access-")]


def test_the_same_configuration_has_the_same_name(cluster: ApiServer, roll_out: RollOut) -> None:
    roll_out(0.1, "a")
    before = names(cluster, "ConfigMap") + names(cluster, "Secret")
    roll_out(0.2, "a")
    roll_out(0.1, "a")
    assert len(names(cluster, "Secret")) == 1
    assert set(before) < set(names(cluster, "ConfigMap") + names(cluster, "Secret"))


def test_a_canary_has_its_own_options_and_keys(cluster: ApiServer, roll_out: RollOut) -> None:
    roll_out(0.1)
    stable = configuration(cluster, "twice")
    roll_out(0.2, "a", canary=Rollout(canary_percent=25))
    assert (configuration(cluster, "twice"), stable) == (("0.1", ""), ("0.1", ""))
    share, keys = configuration(cluster, "twice-canary")
    assert share == "0.2"
    assert keys.startswith("sha256:")
    delete_unused(Cluster.connect("", "default"), history, print, lambda: None)
    assert configuration(cluster, "twice-canary") == (share, keys), "they are in use as long as its Deployment exists"
    roll_out(0.2, "a")
    assert configuration(cluster, "twice") == (share, keys), "the evaluated canary gets all requests"


@pytest.mark.parametrize("ended_by", ["pipe", "a person"])
def test_a_canary_that_ends_leaves_no_configuration(
    ended_by: str, cluster: ApiServer, roll_out: RollOut, configure: Configure
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
        assert len(names(cluster, "ConfigMap")) == 4
        deploy.roll_back(configure(), Access(), print, lambda version: None)
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


def test_a_key_that_the_stable_version_refuses_is_named(cluster: ApiServer, roll_out: RollOut, model: Model) -> None:
    roll_out(0.1, "a")
    pods = counting_pods(model)
    cluster.pod = lambda pod, path, body: (
        (401, {}, {}) if path == "/metrics" and "canary" not in pod else pods(pod, path, body)
    )
    with pytest.raises(StageError, match="does not accept our API key; a canary needs one that both versions accept"):
        roll_out(0.2, "b", canary=Rollout(canary_percent=25, auto=True, observe_seconds=1))


def test_nothing_is_deleted_once_another_deployment_has_started(cluster: ApiServer, roll_out: RollOut) -> None:
    def lost() -> None:
        raise ResourceError("another process took it")

    roll_out(0.1)
    cluster.store.delete("/api/v1/namespaces/default/configmaps/twice-version-1")
    reports: list[str] = []
    delete_unused(Cluster.connect("", "default"), history, reports.append, lost)
    assert len(names(cluster, "ConfigMap")) == 1
    assert reports == ["warning: unused ConfigMaps and Secrets are left: another process took it"]
    delete_unused(Cluster.connect("", "default"), history, reports.append, lambda: None)
    assert names(cluster, "ConfigMap") == []


def test_a_config_map_of_another_owner_stays(cluster: ApiServer, roll_out: RollOut) -> None:
    labels = {"app.kubernetes.io/name": "twice", "app.kubernetes.io/component": "serving"}
    metadata = {"name": "twice-options", "labels": labels}
    cluster.add({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}})
    roll_out(0.1)
    assert "twice-options" in names(cluster, "ConfigMap")


def test_restoring_a_version_ends_the_canary_and_leaves_nothing_unfinished(
    cluster: ApiServer, roll_out: RollOut, roll_back: Callable[..., Any]
) -> None:
    roll_out(0.1)
    roll_out(0.2)
    roll_out(0.3, canary=Rollout(canary_percent=25))
    assert roll_back(1)[0].number == 1
    found = history()
    assert (found.live_canary, found.unfinished, sorted(found.versions)) == (None, None, [1, 2])


def test_a_version_serves_since_its_first_deployment(cluster: ApiServer, roll_out: RollOut) -> None:
    roll_out(0.1)
    path = "/api/v1/namespaces/default/configmaps/twice-version-1"
    text = cluster.objects[path]["data"]["version.json"]
    version = history().current
    assert version is not None
    older = text.replace(version.since, "2026-01-01T00:00:00+00:00")
    cluster.store.change(path, lambda item: item["data"].update({"version.json": older}))
    roll_out(0.1)
    version = history().current
    assert version is not None
    assert (version.since, version.state) == ("2026-01-01T00:00:00+00:00", "served")
