"""Changes that a plan lists, and drift of what was applied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s import deploy
from k8s.cluster.cluster import Cluster, describe_changes, field_changes
from k8s.cluster.drift import inspect_deployment
from k8s.objects import serving
from pipeline.contract.bundle import Bundle
from pipeline.system.errors import ConfigError

from ..api_server import ApiServer, Response
from ..conftest import Configure

DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/twice"


def item(**spec: Any) -> dict[str, Any]:
    return {"kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}


@pytest.mark.parametrize(
    ("live", "planned", "lines"),
    [
        (item(a=1), item(a=1), []),
        (item(a=1), item(a=2), ["spec.a: 1 → 2"]),
        (item(b=1), item(a="x", b=1), ["spec.a: + x"]),
        (item(c=[{"name": "n", "v": 1}]), item(c=[{"name": "n", "v": 2}]), ["spec.c[n].v: 1 → 2"]),
        (item(c=[1, 2]), item(c=[1]), ["spec.c[1]: - 2"]),
        (None, item(a=1), []),
    ],
)
def test_only_changed_fields_are_listed(live: Any, planned: Any, lines: list[str]) -> None:
    assert field_changes(live, planned) == lines


def test_fields_of_the_server_are_no_change() -> None:
    live = {**item(a=1), "status": {"x": 1}}
    live["metadata"] = {"name": "d", "resourceVersion": "1", "managedFields": []}
    assert field_changes(live, item(a=1)) == []


def test_values_of_a_secret_are_hidden() -> None:
    live, planned = ({"kind": "Secret", "metadata": {}, "data": {"key": value}} for value in ("old", "new"))
    assert field_changes(live, planned) == ["data.key: changed"]


@pytest.fixture
def objects(api: ApiServer, configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    objects = serving.serving_objects(configure(), bundle, "twice:1")
    Cluster.connect("", "default").apply(objects, print)
    return objects


def test_a_plan_lists_changes_and_changes_nothing(
    api: ApiServer, objects: list[dict[str, Any]], configure: Configure, bundle: Bundle
) -> None:
    planned = serving.serving_objects(configure({"memory": "1Gi"}), bundle, "twice:2")
    before = api.objects[DEPLOYMENT]
    lines = describe_changes(Cluster.connect("", "default").plan(planned))
    place = "plan: deployment/twice: spec.template.spec.containers[server]"
    assert lines == [
        f"{place}.image: twice:1 → twice:2",
        f"{place}.resources.limits.memory: 512Mi → 1Gi",
        f"{place}.resources.requests.memory: 512Mi → 1Gi",
    ]
    assert api.objects[DEPLOYMENT] == before


def edit(api: ApiServer) -> None:
    """Change a field as `kubectl edit` does."""
    body = {**api.objects[DEPLOYMENT], "spec": {**api.objects[DEPLOYMENT]["spec"], "progressDeadlineSeconds": 7}}
    body = {name: body[name] for name in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "twice"}}
    body["spec"] = {"progressDeadlineSeconds": 7}
    api.store.apply(DEPLOYMENT, body, "kubectl-edit", force=True)


def test_fields_set_by_others_are_not_overwritten(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    edit(api)
    cluster = Cluster.connect("", "default")
    with pytest.raises(ConfigError, match=r"\.spec\.progressDeadlineSeconds was set by kubectl-edit"):
        cluster.apply(objects, print)
    assert api.objects[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] == 7


def test_drift_is_listed_field_by_field(
    api: ApiServer, configure: Configure, bundle: Bundle, model: Callable[[str, Any], Response], tmp_path: Path
) -> None:
    api.unready_polls, api.service = 0, model
    config = configure()
    deploy.deploy(config, bundle, "twice:1", tmp_path, False, print)
    cluster = Cluster.connect("", "default")
    assert inspect_deployment(cluster, deploy.read_versions(cluster, config)).drift == ()
    edit(api)
    api.store.delete("/api/v1/namespaces/default/services/twice")
    assert inspect_deployment(cluster, deploy.read_versions(cluster, config)).drift == (
        "service/twice is gone",
        "deployment/twice: spec.progressDeadlineSeconds: 7 → 900",
    )
    api.store.delete(DEPLOYMENT)
    assert inspect_deployment(cluster, deploy.read_versions(cluster, config)).state == "gone"


def test_what_others_applied_is_named(objects: list[dict[str, Any]], configure: Configure, bundle: Bundle) -> None:
    cluster = Cluster.connect("", "default")
    found = inspect_deployment(cluster, deploy.read_versions(cluster, configure()))
    assert found.state == f"bundle {bundle.digest[:12]} serves, which `pipe deploy` did not deploy"
