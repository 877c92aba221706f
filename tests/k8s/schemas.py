"""JSON schemas of Kubernetes objects: built-in kinds and those of KServe, JobSet and Kubeflow Trainer from packages.

Where the published CRDs are at hand, they judge the custom resources a second time.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

from .published_models import model_schema

# The published CRDs of KServe, JobSet, Kubeflow Trainer and the Gateway API, which are not part of the project.
CRDS = Path(os.environ.get("PIPE_TEST_CRDS") or Path(__file__).resolve().parents[3] / "shared" / "crds")
FILES = {
    "HTTPRoute": "gateway-api-*/gateway.networking.k8s.io_httproutes.yaml",
    "InferenceService": "kserve-*/serving.kserve.io_inferenceservices.yaml",
    "JobSet": "jobset-*/jobset.x-k8s.io_jobsets.yaml",
    "ServingRuntime": "kserve-*/serving.kserve.io_servingruntimes.yaml",
    "TrainJob": "trainer-*/trainer.kubeflow.org_trainjobs.yaml",
    "TrainingRuntime": "trainer-*/trainer.kubeflow.org_trainingruntimes.yaml",
}
# Parts of APIs that no package has models of, as far as we use them.
_HTTP_ROUTE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "gateway.networking.k8s.io/v1"},
        "kind": {"const": "HTTPRoute"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["parentRefs", "rules"],
            "additionalProperties": False,
            "properties": {
                "hostnames": {"type": "array", "items": {"type": "string"}},
                "parentRefs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "additionalProperties": False,
                        "properties": {
                            name: {"type": "string"} for name in ("group", "kind", "name", "namespace", "sectionName")
                        },
                    },
                },
                "rules": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"},
                            "matches": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "path": {
                                            "type": "object",
                                            "required": ["type", "value"],
                                            "additionalProperties": False,
                                            "properties": {
                                                "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                                                "value": {"type": "string", "maxLength": 1024},
                                            },
                                        }
                                    },
                                },
                            },
                            "backendRefs": {
                                "type": "array",
                                "items": {
                                    "type": "object",
                                    "required": ["name", "port"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "group": {"const": ""},
                                        "kind": {"const": "Service"},
                                        "name": {"type": "string"},
                                        "namespace": {"type": "string"},
                                        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                                        "weight": {"type": "integer", "minimum": 0, "maximum": 1000000},
                                    },
                                },
                            },
                            "timeouts": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {
                                    name: {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
                                    for name in ("request", "backendRequest")
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}
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
# Of KEDA, the part of its CRD that we use; its triggers take texts only.
_SCALED_OBJECT_SPEC = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount={"type": "integer"},
    maxReplicaCount={"type": "integer"},
    pollingInterval={"type": "integer"},
    advanced=_object("", horizontalPodAutoscalerConfig=_object("", name=_TEXT, behavior={"type": "object"})),
    triggers={
        "type": "array",
        "items": _object(
            "type metadata",
            type=_TEXT,
            metricType={"enum": ["AverageValue", "Value", "Utilization"]},
            metadata={"type": "object", "additionalProperties": _TEXT},
        ),
    },
)
_SCALED_OBJECT = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={},
    metadata={"type": "object"},
    spec=_SCALED_OBJECT_SPEC,
)
_OWN_SCHEMAS = {"HTTPRoute": _HTTP_ROUTE, "ServiceMonitor": _SERVICE_MONITOR, "ScaledObject": _SCALED_OBJECT}
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

# The package would read its large schemas from disk at every validation.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def validate(item: dict[str, Any]) -> None:
    """Validate strictly: an unknown field is an error."""
    kind = item["kind"]
    if kind in _OWN_SCHEMAS:
        jsonschema.Draft202012Validator(_OWN_SCHEMAS[kind]).validate(item)
    elif (spec := _GITOPS.get(f"{item.get('apiVersion')} {kind}")) is not None:
        schema = _object("apiVersion kind metadata spec", apiVersion={}, kind={}, metadata=_METADATA, spec=spec)
        jsonschema.Draft202012Validator(schema).validate(item)
    elif kind in FILES:
        _published(kind).validate(item)
    else:
        validate_builtin(item)
    if kind in FILES and CRDS.is_dir():
        _custom(kind, item["apiVersion"]).validate(item)


def validate_builtin(item: dict[str, Any]) -> None:
    kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@cache
def _published(kind: str) -> Any:
    return jsonschema.Draft202012Validator(_closed(model_schema(kind)))


@cache
def _custom(kind: str, api_version: str) -> Any:
    file = max(CRDS.glob(FILES[kind]))
    crd = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
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
