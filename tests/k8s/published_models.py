"""JSON schemas of custom resources, from the Python models that their projects publish."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import kserve.models
import kubeflow_trainer_api.models
import kubernetes.client

_TRAINER = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "JobsetV1alpha2JobSet"),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "TrainerV1alpha1TrainJob"),
    "TrainingRuntime": ("trainer.kubeflow.org/v1alpha1", "TrainerV1alpha1TrainingRuntime"),
}
_KSERVE = {
    "InferenceService": ("serving.kserve.io/v1beta1", "V1beta1InferenceService"),
    "ServingRuntime": ("serving.kserve.io/v1alpha1", "V1alpha1ServingRuntime"),
}
_SIMPLE_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "datetime": {"type": "string"},
    "object": {},
    "ResourceQuantity": {"type": ["string", "number"]},
    "V1beta1MetricQuantity": {"type": ["string", "number"]},
    "IntOrString": {"type": ["string", "integer"]},
}
# In pydantic's schema these are objects of the generator, not what is in a manifest.
_UNIONS = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"]},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}
_REQUIRED = re.compile(r"Invalid value for `(\w+)`, must not be `None`")


def model_schema(kind: str) -> dict[str, Any]:
    """Return the schema of a kind; unlisted properties are not yet forbidden."""
    if kind in _TRAINER:
        api_version, name = _TRAINER[kind]
        schema = _from_pydantic(getattr(kubeflow_trainer_api.models, name))
    else:
        api_version, name = _KSERVE[kind]
        schema = _from_openapi(name)
    identity = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": {"type": "object"}}
    schema["properties"] |= identity  # ObjectMeta is a string of dates in some models
    schema["required"] = sorted({*schema.get("required", ()), *identity, "spec"})
    return schema


def _from_pydantic(model: Any) -> dict[str, Any]:
    schema = model.model_json_schema(by_alias=True)
    schema["$defs"] |= _UNIONS
    without_null: dict[str, Any] = _without_null(schema)
    return without_null


def _without_null(schema: Any) -> Any:
    """Replace `X or null`, which is how these models write an optional field, by X."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    options = [item for item in schema.get("anyOf", ()) if item != {"type": "null"}]
    if len(options) == 1:
        rest = {name: value for name, value in schema.items() if name != "anyOf"}
        return _without_null({**rest, **options[0]})
    return {name: _without_null(value) for name, value in schema.items()}


def _from_openapi(name: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    _define(name, definitions)
    return {**definitions[name], "$defs": definitions}


def _define(name: str, definitions: dict[str, Any]) -> None:
    model = _model(name)
    required = set(_REQUIRED.findall(inspect.getsource(model)))
    schema: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    definitions[name] = schema  # before its fields, which may refer to it
    for field, kind in model.openapi_types.items():
        json_name = model.attribute_map[field]
        schema["properties"][json_name] = _type_schema(kind, definitions)
        if field in required:
            schema["required"].append(json_name)


def _type_schema(kind: str, definitions: dict[str, Any]) -> dict[str, Any] | bool:
    """Return the schema of a type; a type without a published model accepts nothing, so that every field is checked."""
    if kind in _SIMPLE_TYPES:
        return _SIMPLE_TYPES[kind]
    if match := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        return {"type": "array", "items": _type_schema(match[1], definitions)}
    if match := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", kind):
        return {"type": "object", "additionalProperties": _type_schema(match[1], definitions)}
    if _model(kind) is None:
        return False
    if kind not in definitions:
        _define(kind, definitions)
    return {"$ref": f"#/$defs/{kind}"}


@cache
def _model(name: str) -> Any:
    """Return the class of a type: kserve's own, or Kubernetes' under its short name; None if neither has one."""
    for module in (kserve.models, kubernetes.client):
        for candidate in (name, re.sub(r"^K8sIoApi[A-Z][a-z]+(?=V\d)", "", name)):
            if hasattr(module, candidate):
                return getattr(module, candidate)
    return None
