"""What `/openapi.json` says of the service."""

from __future__ import annotations

from typing import Any

from serve.routes import PATHS

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


_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
_WISH = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
}
_TENSORS = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _TENSOR},
        "outputs": {"type": "array", "items": _WISH},
    },
}
_ASKED = {
    "predict": ("Predictions for instances, through the model's codec", _INSTANCES),
    "infer": ("Inference on raw tensors (Open Inference Protocol)", _TENSORS),
}


_LOOK = {"responses": {"200": {"description": "what is asked for"}}}


def document(title: str, version: str) -> dict[str, Any]:
    """All that `routes` knows."""
    paths: dict[str, Any] = {}
    for kind, (path, methods) in PATHS.items():
        route: dict[str, Any] = (
            _ask(kind) if methods == ("POST",) else {"responses": {"200": {"description": "what is asked for"}}}
        )
        if "{model_name}" in path:
            name = {"name": "model_name", "in": "path", "required": True, "schema": {"type": "string"}}
            route = {**route, "parameters": [name]}
        paths[path] = {methods[0].lower(): {"operationId": kind, **route}}
    return {"openapi": "3.1.0", "info": {"title": title, "version": version}, "paths": paths}


def _ask(kind: str) -> dict[str, Any]:
    summary, schema = _ASKED[kind]
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "the answer"}}
        | {code: {"description": text, "content": _ERROR} for code, text in _REFUSALS.items()},
    }
