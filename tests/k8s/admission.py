"""What the API server of the tests refuses of an object that it could otherwise keep."""

from __future__ import annotations

import json
from functools import cache

import kubernetes_validate

from .object_store import Object

# Of what is there already, with how the server says it.
_FIXED = {
    "Job": ("template", "completions", "selector", "completionMode"),
    "Deployment": ("selector",),
    "JobSet": ("replicatedJobs",),
}

_INDEXED = ("backoffLimitPerIndex", "maxFailedIndexes")


@cache
def validation_problem(text: str) -> str:
    """What the strict schema says against an object; most are applied several times."""
    try:
        kubernetes_validate.validate(json.loads(text), kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return ""


def immutable_field_causes(old: Object | None, new: Object) -> list[Object]:
    """The causes of a 422, one for each field that nobody may change."""
    if old is None:
        return []
    return [
        {
            "reason": "FieldValueInvalid",
            "field": f"spec.{field}",
            "message": f"Invalid value: {json.dumps(new['spec'].get(field))}: field is immutable",
        }
        for field in _FIXED.get(new["kind"], ())
        if old["spec"].get(field) != new["spec"].get(field)
    ]


def validation_causes(item: Object) -> list[Object]:
    """The causes of a 422 that no schema knows: what of a Job does not go together."""
    if item["kind"] != "Job":
        return []
    spec = item["spec"]
    pod, policy = spec["template"]["spec"], spec.get("podFailurePolicy", {}).get("rules", [])
    named = {rule["onExitCodes"].get("containerName") for rule in policy if "onExitCodes" in rule} - {None}
    there = {container["name"] for container in pod["containers"] + pod.get("initContainers", [])}
    indexed = spec.get("completionMode") == "Indexed"
    found = [(word, "requires indexed completion mode") for word in _INDEXED if word in spec and not indexed]
    if indexed and "completions" not in spec:
        found.append(("completions", "Required value: when completion mode is Indexed"))
    if "maxFailedIndexes" in spec and "backoffLimitPerIndex" not in spec:
        found.append(("backoffLimitPerIndex", "Required value: when maxFailedIndexes is specified"))
    if policy and pod.get("restartPolicy") != "Never":
        found.append(("podFailurePolicy", 'Invalid value: "": only "Never" is supported for restartPolicy'))
    found += [("podFailurePolicy", f'Invalid value: "{name}": must be one of the containers') for name in named - there]
    if indexed and len(f"{item['metadata']['name']}-{spec['completions'] - 1}") > 63:
        found.append(("completions", "Invalid value: will not be able to create pod with invalid DNS label"))
    return [{"reason": "FieldValueInvalid", "field": f"spec.{word}", "message": text} for word, text in found]
