"""Validation in the test API server: schemas, immutable fields, and rules that no schema expresses."""

from __future__ import annotations

import json
from functools import cache

import kubernetes_validate

from .object_store import Object
from .schemas import validate_builtin

# Fields of the spec that cannot be changed.
_IMMUTABLE = {
    "Job": ("template", "completions", "selector", "completionMode"),
    "Deployment": ("selector",),
    "JobSet": ("replicatedJobs",),
}

_INDEXED = ("backoffLimitPerIndex", "maxFailedIndexes")


@cache
def validation_problem(text: str) -> str:
    """Return the error of the strict schema; cached, since most objects are applied several times."""
    try:
        validate_builtin(json.loads(text))
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def immutable_field_causes(old: Object | None, new: Object) -> list[Object]:
    """Return the causes of a 422, one for each immutable field that changes."""
    if old is None:
        return []
    if old.get("immutable") and new.get("data") != old.get("data"):
        text = "Forbidden: field is immutable when `immutable` is set"
        return [{"reason": "FieldValueForbidden", "field": "data", "message": text}]
    return [
        {
            "reason": "FieldValueInvalid",
            "field": f"spec.{field}",
            "message": f"Invalid value: {json.dumps(new['spec'].get(field))}: field is immutable",
        }
        for field in _IMMUTABLE.get(new["kind"], ())
        if old["spec"].get(field) != new["spec"].get(field)
    ]


def validation_causes(item: Object) -> list[Object]:
    """Return the causes of a 422 for fields of a Job that do not fit together."""
    if item["kind"] != "Job":
        return []
    spec = item["spec"]
    pod, policy = spec["template"]["spec"], spec.get("podFailurePolicy", {}).get("rules", [])
    named = {rule["onExitCodes"].get("containerName") for rule in policy if "onExitCodes" in rule} - {None}
    containers = {container["name"] for container in pod["containers"] + pod.get("initContainers", [])}
    indexed = spec.get("completionMode") == "Indexed"
    causes = [(field, "requires indexed completion mode") for field in _INDEXED if field in spec and not indexed]
    if indexed and "completions" not in spec:
        causes.append(("completions", "Required value: when completion mode is Indexed"))
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        causes.append(("backoffLimitPerIndex", "Required value: when maxFailedIndexes is specified"))
    if policy and pod.get("restartPolicy") != "Never":
        causes.append(("podFailurePolicy", 'Invalid value: "": only "Never" is supported for restartPolicy'))
    causes += [
        ("podFailurePolicy", f'Invalid value: "{name}": must be one of the containers') for name in named - containers
    ]
    if indexed and len(f"{item['metadata']['name']}-{spec['completions'] - 1}") > 63:
        causes.append(("completions", "Invalid value: will not be able to create pod with invalid DNS label"))
    return [{"reason": "FieldValueInvalid", "field": f"spec.{field}", "message": text} for field, text in causes]
