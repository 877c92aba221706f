from __future__ import annotations

import json

import pytest
import yaml

from k8s.cluster.api import Answer, pause_of, plural
from k8s.cluster.errors import missing_rule, refusal, taken_fields
from pipeline.contract.errors import ConfigError, PipelineError, ResourceError, StageError

FORBIDDEN = (
    'deployments.apps "twice" is forbidden: User "me" cannot patch resource "deployments" in API group "apps" '
    'in the namespace "models"'
)


def answer(status: int, message: str) -> Answer:
    return Answer(status, {}, json.dumps({"kind": "Status", "message": message}).encode())


def told(status: int, message: str, api_version: str = "apps/v1") -> PipelineError:
    return refusal(answer(status, message), "deployment/twice", "models", api_version)


def test_a_missing_rule_is_printed_as_yaml_that_can_be_put_into_a_role() -> None:
    error = told(403, FORBIDDEN)
    assert isinstance(error, ResourceError)
    text = str(error)
    assert yaml.safe_load(text[text.index("- apiGroups") :]) == [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["patch"]}
    ]


def test_a_rule_of_the_core_group_names_the_empty_one() -> None:
    rule = missing_rule('pods is forbidden: User "me" cannot list resource "pods" in API group "" in the namespace "x"')
    assert yaml.safe_load(rule) == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert missing_rule("no") == ""


def test_a_quota_names_what_is_used_up_and_what_to_ask_less_of() -> None:
    error = told(403, 'jobs.batch "a" is forbidden: exceeded quota: small, requested: cpu=4, used: 8, limited: 8')
    assert isinstance(error, StageError)
    assert "quota of namespace models is used up (small, requested: cpu=4" in str(error)
    assert "deploy.replicas" in str(error)


@pytest.mark.parametrize(
    ("api_version", "mend"),
    [
        ("serving.kserve.io/v1beta1", "install KServe"),
        ("jobset.x-k8s.io/v1alpha2", "install JobSet"),
        ("trainer.kubeflow.org/v1alpha1", "install Kubeflow Trainer"),
        ("monitoring.coreos.com/v1", "Prometheus operator"),
        ("gateway.networking.k8s.io/v1", "Gateway API"),
        ("strange.example/v1", "install what serves strange.example/v1"),
    ],
)
def test_a_missing_crd_is_named_with_how_to_install_it(api_version: str, mend: str) -> None:
    error = refusal(Answer(404, {}, b"404 page not found\n"), "x/twice", "models", api_version)
    assert f"the cluster knows no {api_version}" in str(error)
    assert mend in str(error)


def test_a_missing_namespace_can_be_made() -> None:
    assert "kubectl create namespace models" in str(told(404, 'namespaces "models" not found'))


def test_fields_of_others_are_named_with_their_owners() -> None:
    reason = (
        'Apply failed with 2 conflicts: conflicts with "kubectl-edit" using apps/v1:\n'
        '- .spec.a\n- .spec.template.spec.containers[name="server"].image'
    )
    image = '.spec.template.spec.containers[name="server"].image'
    assert taken_fields(reason) == [("kubectl-edit", ".spec.a"), ("kubectl-edit", image)]
    single = 'Apply failed with 1 conflict: conflict with "hpa" using apps/v1: .spec.replicas'
    assert taken_fields(single) == [("hpa", ".spec.replicas")]
    error = told(409, reason)
    assert isinstance(error, ConfigError)
    assert ".spec.a was set by kubectl-edit" in str(error)
    assert "rollout.take_over=true" in str(error)


def invalid(*causes: tuple[str, str]) -> PipelineError:
    found = [{"reason": "FieldValueInvalid", "field": field, "message": message} for field, message in causes]
    body = json.dumps({"kind": "Status", "message": "is invalid", "details": {"causes": found}})
    return refusal(Answer(422, {}, body.encode()), "deployment/twice", "models", "apps/v1")


def test_a_field_that_cannot_change_is_named_with_what_takes_the_old_object_away() -> None:
    value = json.dumps({"matchLabels": {"app": "other: one"}})
    error = invalid(("spec.selector", f"Invalid value: {value}: field is immutable"))
    assert isinstance(error, ConfigError)
    assert "deployment/twice: spec.selector cannot be changed" in str(error)
    assert "`kubectl -n models delete deployment twice`" in str(error)


def test_an_invalid_field_is_told_without_its_whole_value() -> None:
    error = invalid(("spec.replicas", "Invalid value: -1: must be greater than or equal to 0"))
    assert (
        str(error)
        == "deployment/twice: the cluster finds it invalid: spec.replicas: must be greater than or equal to 0"
    )
    assert "refused it (422): is invalid" in str(told(422, "is invalid"))


def test_nobody_at_all_is_not_told_to_ask_for_a_role() -> None:
    text = str(told(403, FORBIDDEN.replace('"me"', '"system:anonymous"')))
    assert "does not know who we are" in text
    assert "apiGroups" not in text


def test_lost_credentials_are_no_refusal_of_the_object() -> None:
    assert "log in again" in str(told(401, "Unauthorized"))


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "3"}, 3.0),
        (503, {"retry-after": "900"}, 20.0),
        (503, {}, None),
        (500, {"retry-after": "1"}, None),
        (429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ],
)
def test_only_what_is_put_off_is_waited_for(status: int, headers: dict[str, str], seconds: float | None) -> None:
    assert pause_of(Answer(status, headers, b"")) == seconds


def test_kinds_are_served_under_their_plural() -> None:
    kinds = ["Job", "NetworkPolicy", "Ingress", "HTTPRoute", "PodDisruptionBudget"]
    assert [plural(kind) for kind in kinds] == [
        "jobs", "networkpolicies", "ingresses", "httproutes", "poddisruptionbudgets",
    ]  # fmt: skip
