"""Error responses of the API server are explained with the fix."""

from __future__ import annotations

import json

import pytest
import yaml

from k8s.cluster.api import Response
from k8s.cluster.errors import api_error, conflicting_fields, missing_role_rule
from pipeline.system.errors import ConfigError, PipelineError, ResourceError, StageError

FORBIDDEN = (
    'deployments.apps "twice" is forbidden: User "me" cannot patch resource "deployments" in API group "apps" '
    'in the namespace "models"'
)


def status_response(status: int, message: str) -> Response:
    return Response(status, {}, json.dumps({"kind": "Status", "message": message}).encode())


def error_for(status: int, message: str, api_version: str = "apps/v1") -> PipelineError:
    return api_error(status_response(status, message), "deployment/twice", "models", api_version)


def test_a_missing_role_rule_is_printed_as_yaml() -> None:
    error = error_for(403, FORBIDDEN)
    assert isinstance(error, ResourceError)
    text = str(error)
    assert yaml.safe_load(text[text.index("- apiGroups") :]) == [
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["patch"]}
    ]


def test_a_rule_for_the_core_group_has_an_empty_name() -> None:
    rule = missing_role_rule(
        'pods is forbidden: User "me" cannot list resource "pods" in API group "" in the namespace "x"'
    )
    assert yaml.safe_load(rule) == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert missing_role_rule("no") == ""


def test_a_quota_error_names_the_settings_to_lower() -> None:
    error = error_for(403, 'jobs.batch "a" is forbidden: exceeded quota: small, requested: cpu=4, used: 8, limited: 8')
    assert isinstance(error, StageError)
    assert "quota of namespace models is used up (small, requested: cpu=4" in str(error)
    assert "deploy.min_replicas" in str(error)


@pytest.mark.parametrize(
    ("api_version", "fix"),
    [
        ("serving.kserve.io/v1beta1", "install KServe"),
        ("jobset.x-k8s.io/v1alpha2", "install JobSet"),
        ("trainer.kubeflow.org/v1alpha1", "install Kubeflow Trainer"),
        ("monitoring.coreos.com/v1", "Prometheus operator"),
        ("gateway.networking.k8s.io/v1", "Gateway API"),
        ("strange.example/v1", "install what serves strange.example/v1"),
    ],
)
def test_a_missing_crd_is_explained_with_how_to_install_it(api_version: str, fix: str) -> None:
    error = api_error(Response(404, {}, b"404 page not found\n"), "x/twice", "models", api_version)
    assert f"the cluster has no API {api_version}" in str(error)
    assert fix in str(error)


def test_a_missing_namespace_names_the_command_to_create_it() -> None:
    assert "kubectl create namespace models" in str(error_for(404, 'namespaces "models" not found'))


def test_fields_of_others_are_named_with_their_owners() -> None:
    reason = (
        'Apply failed with 2 conflicts: conflicts with "kubectl-edit" using apps/v1:\n'
        '- .spec.a\n- .spec.template.spec.containers[name="server"].image'
    )
    image = '.spec.template.spec.containers[name="server"].image'
    assert conflicting_fields(reason) == [("kubectl-edit", ".spec.a"), ("kubectl-edit", image)]
    single = 'Apply failed with 1 conflict: conflict with "hpa" using apps/v1: .spec.replicas'
    assert conflicting_fields(single) == [("hpa", ".spec.replicas")]
    error = error_for(409, reason)
    assert isinstance(error, ConfigError)
    assert ".spec.a was set by kubectl-edit" in str(error)
    assert "`pipe deploy --render`" in str(error)


def invalid(*causes: tuple[str, str]) -> PipelineError:
    found = [{"reason": "FieldValueInvalid", "field": field, "message": message} for field, message in causes]
    body = json.dumps({"kind": "Status", "message": "is invalid", "details": {"causes": found}})
    return api_error(Response(422, {}, body.encode()), "deployment/twice", "models", "apps/v1")


def test_an_immutable_field_names_the_command_to_delete_the_object() -> None:
    value = json.dumps({"matchLabels": {"app": "other: one"}})
    error = invalid(("spec.selector", f"Invalid value: {value}: field is immutable"))
    assert isinstance(error, ConfigError)
    assert "deployment/twice: spec.selector cannot be changed" in str(error)
    assert "`kubectl -n models delete deployment twice`" in str(error)


def test_an_invalid_field_is_reported_without_its_value() -> None:
    error = invalid(("spec.replicas", "Invalid value: -1: must be greater than or equal to 0"))
    assert (
        str(error)
        == "deployment/twice: the cluster rejects it as invalid: spec.replicas: must be greater than or equal to 0"
    )
    assert "refused it (422): is invalid" in str(error_for(422, "is invalid"))


def test_an_anonymous_user_is_not_advised_to_add_a_role() -> None:
    text = str(error_for(403, FORBIDDEN.replace('"me"', '"system:anonymous"')))
    assert "does not know who we are" in text
    assert "apiGroups" not in text


def test_rejected_credentials_advise_to_log_in() -> None:
    assert "log in again" in str(error_for(401, "Unauthorized"))


def test_overwriting_is_not_suggested_for_a_selector_that_cannot_change() -> None:
    reason = (
        'Apply failed with 2 conflicts: conflicts with "kubectl-create" using apps/v1:\n'
        '- .spec.selector.matchLabels.app\n- .spec.template.spec.containers[name="server"].image'
    )
    error = error_for(409, reason)
    assert isinstance(error, ConfigError)
    assert "spec.selector.matchLabels.app cannot be changed in the existing object" in str(error)
    assert "kubectl -n models delete deployment twice" in str(error)
    assert "--force-conflicts" not in str(error)
