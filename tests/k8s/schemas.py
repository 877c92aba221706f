"""JSON schemas of Kubernetes objects: built-in kinds from a package, others from their published CRDs."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

# The published CRDs of KServe, JobSet, Kubeflow Trainer and the Gateway API; kinds without one are skipped.
CRDS = Path(os.environ.get("PIPE_TEST_CRDS") or Path(__file__).resolve().parents[3] / "shared" / "crds")
FILES = {
    "HTTPRoute": "gateway-api-*/gateway.networking.k8s.io_httproutes.yaml",
    "InferenceService": "kserve-*/serving.kserve.io_inferenceservices.yaml",
    "JobSet": "jobset-*/jobset.x-k8s.io_jobsets.yaml",
    "ServingRuntime": "kserve-*/serving.kserve.io_servingruntimes.yaml",
    "TrainJob": "trainer-*/trainer.kubeflow.org_trainjobs.yaml",
    "TrainingRuntime": "trainer-*/trainer.kubeflow.org_trainingruntimes.yaml",
}
# The CRD of the Prometheus operator is not among them: the part of its API that we use.
_SERVICE_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["selector", "endpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object", "additionalProperties": False, "properties": {"matchLabels": {}}},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {},
                            "scheme": {"enum": ["http", "https"]},
                            "tlsConfig": {"additionalProperties": False, "properties": {"insecureSkipVerify": {}}},
                            "authorization": {"additionalProperties": False, "properties": {"credentials": {}}},
                        },
                    },
                },
            },
        },
    },
}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required.split()}


_TEXT = {"type": "string", "minLength": 1}
_METADATA = _object("name namespace", name=_TEXT, namespace=_TEXT)
_SOURCE = _object("kind name", kind={"const": "GitRepository"}, name=_TEXT)
_SWITCH, _DURATION = {"type": "boolean"}, {"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"}
# Of Argo CD and Flux, the part of their CRDs that our examples use.
_GITOPS = {
    "argoproj.io/v1alpha1 Application": _object(
        "destination project source",
        project=_TEXT,
        source=_object("repoURL", repoURL=_TEXT, targetRevision=_TEXT, path=_TEXT),
        destination=_object("", server=_TEXT, namespace=_TEXT),
        syncPolicy=_object(
            "",
            automated=_object("", prune=_SWITCH, selfHeal=_SWITCH),
            syncOptions={"type": "array", "items": {"type": "string", "pattern": r"^\w+=\w+$"}},
        ),
    ),
    "source.toolkit.fluxcd.io/v1 GitRepository": _object(
        "interval url", interval=_DURATION, url={"type": "string", "pattern": "^(http|https|ssh)://.*$"},
        ref=_object("", branch=_TEXT),
    ),
    "kustomize.toolkit.fluxcd.io/v1 Kustomization": _object(
        "interval prune sourceRef", interval=_DURATION, timeout=_DURATION, sourceRef=_SOURCE, path=_TEXT,
        targetNamespace=_TEXT, prune=_SWITCH, wait=_SWITCH, force=_SWITCH,
        dependsOn={"type": "array", "items": _object("name", name=_TEXT, namespace=_TEXT)},
    ),
}  # fmt: skip

# The package reads its schemas, which are large, from disk at every validation.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def validate(item: dict[str, Any]) -> None:
    """Validate strictly: an unknown field is an error."""
    if item["kind"] == "ServiceMonitor":
        jsonschema.Draft202012Validator(_SERVICE_MONITOR).validate(item)
    elif (spec := _GITOPS.get(f"{item['apiVersion']} {item['kind']}")) is not None:
        schema = _object("apiVersion kind metadata spec", apiVersion={}, kind={}, metadata=_METADATA, spec=spec)
        jsonschema.Draft202012Validator(schema).validate(item)
    elif item["kind"] in FILES:
        _custom(item["kind"], item["apiVersion"]).validate(item)
    else:
        validate_builtin(item)


def validate_builtin(item: dict[str, Any]) -> None:
    kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@cache
def _custom(kind: str, api_version: str) -> Any:
    found = sorted(CRDS.glob(FILES[kind]))
    if not found:
        pytest.skip(f"no CRD at {CRDS / FILES[kind]}: the {kind} is not checked against its schema")
    crd = yaml.load(found[-1].read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    group, _, version = api_version.partition("/")
    assert (crd["spec"]["group"], crd["spec"]["names"]["kind"]) == (group, kind)
    schema = next(item for item in crd["spec"]["versions"] if item["name"] == version)["schema"]["openAPIV3Schema"]
    closed: dict[str, Any] = _closed(schema)
    closed["properties"]["metadata"] = {"type": "object"}  # ObjectMeta, which CRDs do not define
    return jsonschema.Draft202012Validator(closed)


def _closed(schema: Any) -> Any:
    """Forbid unlisted properties, and convert OpenAPI's `int-or-string` to JSON schema."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        closed.pop("type", None)
    free = schema.get("x-kubernetes-preserve-unknown-fields") is True
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        closed.setdefault("additionalProperties", False)
    return closed
