"""The documented Role grants exactly its rules, and with it alone `pipe` deploys."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from k8s.cluster.api import connect
from k8s.cluster.cluster import Cluster
from k8s.objects.kustomize import Object, build
from pipeline.system.errors import ResourceError
from pipeline.system.sources import SOURCE_ROOT

from .place import Place, Reports, wait_until
from .test_control_plane import config_map

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ACCESS = SOURCE_ROOT / "k8s" / "manifests" / "access"
EVERY_USER = ("authentication.k8s.io", "authorization.k8s.io")  # requests about one's own rights


def permissions(rules: list[Object]) -> set[tuple[str, str, str]]:
    return {
        triple for rule in rules for triple in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.fixture
def user(place: Place, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: Reports) -> None:
    """Point KUBECONFIG to the service account of k8s/manifests/access in the test's namespace."""
    objects = build(ACCESS)
    for item in objects:
        item["metadata"]["namespace"] = place.namespace
        for subject in item.get("subjects", []):
            subject["namespace"] = place.namespace
    place.cluster.apply(objects, reports)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    token = place.create("serviceaccounts/pipe/token", request)["status"]["token"]
    body = yaml.safe_load(kubeconfig.read_text())
    (context,) = [item["context"] for item in body["contexts"] if item["name"] == body["current-context"]]
    context["user"], body["users"] = "pipe", [{"name": "pipe", "user": {"token": token}}]
    (tmp_path / "user").write_text(yaml.safe_dump(body))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "user"))


@pytest.mark.usefixtures("user")
def test_role_grants_exactly_the_documented_rules(place: Place) -> None:
    connection, review = connect(""), place_review(place)
    expected = permissions(yaml.safe_load((ACCESS / "role.yaml").read_text())["rules"])

    def granted() -> set[tuple[str, str, str]]:
        response = connection.request(
            "POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body=yaml.safe_dump(review).encode(),
            content_type="application/yaml",
        )  # fmt: skip
        assert response.ok, response.reason
        rules = permissions(response.json()["status"]["resourceRules"])
        return {rule for rule in rules if rule[0] not in EVERY_USER}

    wait_until(lambda: granted() >= expected, "the role binding", 30)
    assert granted() == expected
    connection.pool.clear()


def place_review(place: Place) -> Object:
    spec = {"namespace": place.namespace}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": spec}


@pytest.mark.usefixtures("user")
def test_forbidden_request_names_the_missing_rule(place: Place, reports: Reports) -> None:
    cluster = Cluster.connect("", place.namespace)
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}}
    with pytest.raises(ResourceError, match=r'- apiGroups: \[""\]\n  resources: \["secrets"\]\n  verbs: \[get\]'):
        cluster.read(secret)
    cluster.apply([config_map("options")], reports)
    cluster.connection.pool.clear()


@pytest.mark.usefixtures("user", "supported")
def test_deployment_needs_no_more_than_the_role(place: Place, reports: Reports, nodes: list[str], image: None) -> None:
    place.deploy("stable", reports)
    rollout = {"canary_percent": 30, "auto": True, "observe_seconds": 5, "min_requests": 0}
    place.deploy("candidate", reports, place.config(rollout=rollout))
