"""What the Kubernetes API accepts, as JSON schemas: its own kinds by package, KServe's by the published CRD."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

CRD = (
    Path(__file__).resolve().parents[3]
    / "shared" / "crds" / "kserve-v0.20.0" / "serving.kserve.io_inferenceservices.yaml"
)  # fmt: skip


def validate(item: dict[str, Any]) -> None:
    """Strictly: a field the API does not know is an error."""
    if item["kind"] == "InferenceService":
        _inference_service().validate(item)
    else:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


@cache
def _inference_service() -> Any:
    if not CRD.is_file():
        pytest.skip(f"no KServe CRD at {CRD}: the InferenceService is not checked against its schema")
    crd = yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(item for item in crd["spec"]["versions"] if item["name"] == "v1beta1")
    schema: dict[str, Any] = _closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"]["additionalProperties"] = True  # ObjectMeta, which CRDs do not spell out
    return jsonschema.Draft202012Validator(schema)


def _closed(schema: Any) -> Any:
    """Objects with listed properties take no others, and OpenAPI's `int-or-string` is put as JSON schema puts it."""
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
