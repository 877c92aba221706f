"""What `/openapi.json` says of the two prediction routes, whose bodies the routes read themselves."""

from __future__ import annotations

from typing import Any

from serve.v2 import Body

_REFUSALS = {
    "400": "the request is wrong; the sentence names the field",
    "404": "no such model",
    "413": "the body is larger than the bundle's limit",
    "415": "the body is of a type the service does not read",
    "500": "the service failed; its log has the details",
}
_ERROR = {
    "application/json": {
        "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    }
}
_INSTANCES = {
    "type": "object",
    "required": ["instances"],
    "additionalProperties": False,
    "properties": {"instances": {"type": "array", "minItems": 1, "items": {}}},
}


def predict() -> dict[str, Any]:
    return _route("Predictions for instances, through the model's codec", _INSTANCES)


def infer() -> dict[str, Any]:
    return _route("Inference on raw tensors (Open Inference Protocol)", _inlined(Body.model_json_schema()))


def _route(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {code: {"description": text, "content": _ERROR} for code, text in _REFUSALS.items()},
    }


def _inlined(model: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: OpenAPI would look for them elsewhere than pydantic puts them."""
    definitions = model.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolve(definitions[value["$ref"].rpartition("/")[2]])
        return {key: resolve(item) for key, item in value.items()}

    resolved: dict[str, Any] = resolve(model)
    return resolved
