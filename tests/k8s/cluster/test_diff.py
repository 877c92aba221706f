from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k8s.cluster.cluster import Cluster, changes, told
from k8s.cluster.drift import look
from k8s.objects import serving
from k8s.objects.manifests import write
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import ConfigError

from ..api_server import ApiServer
from ..conftest import Configure

DEPLOYMENT = "/apis/apps/v1/namespaces/default/deployments/twice"


def item(**spec: Any) -> dict[str, Any]:
    return {"kind": "Deployment", "metadata": {"name": "d"}, "spec": spec}


@pytest.mark.parametrize(
    ("live", "wanted", "lines"),
    [
        (item(a=1), item(a=1), []),
        (item(a=1), item(a=2), ["spec.a: 1 → 2"]),
        (item(b=1), item(a="x", b=1), ["spec.a: + x"]),
        (item(c=[{"name": "n", "v": 1}]), item(c=[{"name": "n", "v": 2}]), ["spec.c[n].v: 1 → 2"]),
        (item(c=[1, 2]), item(c=[1]), ["spec.c[1]: - 2"]),
        (None, item(a=1), []),
    ],
)
def test_only_fields_that_differ_are_told(live: Any, wanted: Any, lines: list[str]) -> None:
    assert changes(live, wanted) == lines


def test_what_the_cluster_keeps_itself_is_no_change() -> None:
    live = {**item(a=1), "status": {"x": 1}}
    live["metadata"] = {"name": "d", "resourceVersion": "1", "managedFields": []}
    assert changes(live, item(a=1)) == []


def test_a_secret_is_not_told() -> None:
    live, wanted = ({"kind": "Secret", "metadata": {}, "data": {"key": value}} for value in ("old", "new"))
    assert changes(live, wanted) == ["data.key: changed"]


@pytest.fixture
def objects(api: ApiServer, configure: Configure, bundle: Bundle) -> list[dict[str, Any]]:
    made = serving.objects(configure(), bundle, "twice:1")
    Cluster.connect("").apply(made, "default", print)
    return made


def test_a_plan_names_what_would_change_and_changes_nothing(
    api: ApiServer, objects: list[dict[str, Any]], configure: Configure, bundle: Bundle
) -> None:
    wanted = serving.objects(configure({"memory": "1Gi"}), bundle, "twice:2")
    before = api.objects[DEPLOYMENT]
    lines = told(Cluster.connect("").plan(wanted, "default"))
    place = "plan: deployment/twice: spec.template.spec.containers[server]"
    assert lines == [
        f"{place}.image: twice:1 → twice:2",
        f"{place}.resources.limits.memory: 512Mi → 1Gi",
        f"{place}.resources.requests.memory: 512Mi → 1Gi",
    ]
    assert api.objects[DEPLOYMENT] == before


def edit(api: ApiServer) -> None:
    """By hand, as with `kubectl edit`."""
    body = {**api.objects[DEPLOYMENT], "spec": {**api.objects[DEPLOYMENT]["spec"], "progressDeadlineSeconds": 7}}
    body = {name: body[name] for name in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "twice"}}
    body["spec"] = {"progressDeadlineSeconds": 7}
    api.store.apply(DEPLOYMENT, body, "kubectl-edit", force=True)


def test_what_somebody_else_has_set_is_not_overwritten_unasked(api: ApiServer, objects: list[dict[str, Any]]) -> None:
    edit(api)
    cluster = Cluster.connect("")
    with pytest.raises(ConfigError, match=r"\.spec\.progressDeadlineSeconds was set by kubectl-edit"):
        cluster.apply(objects, "default", print)
    assert api.objects[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] == 7
    cluster.apply(objects, "default", print, take_over=True)
    assert api.objects[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] == 900


def test_drift_is_named_field_by_field(
    api: ApiServer, objects: list[dict[str, Any]], bundle: Bundle, tmp_path: Path
) -> None:
    api.unready_polls = 0
    write(objects, tmp_path)
    assert look("", "default", tmp_path, bundle.digest).drift == ()
    edit(api)
    api.store.delete("/api/v1/namespaces/default/services/twice")
    found = look("", "default", tmp_path, "f" * 64).drift
    assert found == (
        f"bundle {bundle.digest[:12]} serves, {'f' * 12} is recorded",
        "deployment/twice: spec.progressDeadlineSeconds: 7 → 900",
        "service/twice is gone",
    )


def test_a_cluster_that_does_not_answer_is_a_state_too(
    api: ApiServer, objects: list[dict[str, Any]], bundle: Bundle, tmp_path: Path
) -> None:
    write(objects, tmp_path)
    assert look("elsewhere", "default", tmp_path, bundle.digest).state.startswith("cannot be told: ")
    api.store.delete(DEPLOYMENT)
    assert look("", "default", tmp_path, bundle.digest).state == "gone"
