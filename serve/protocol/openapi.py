"""What `/openapi.json` says of the service: every path of every version that is loaded, as strict as it is."""

from __future__ import annotations

from collections.abc import Iterable

from serve.model import OnnxPlane
from serve.protocol import schemas, texts_schemas
from serve.protocol.schemas import Schema
from serve.routes import PATHS, is_open
from serve.served import Served

_MODEL = "/models/{model_name}"
_TEXT: Schema = {"type": "string"}
_TRUTH: Schema = {"type": "boolean"}
_HEADERS = {
    "x-request-id": {"schema": _TEXT, "description": "the request's own, if it gave a sane one; also in the log"},
    "x-bundle-digest": {"schema": _TEXT, "description": "which bundle answered"},
}
_REFUSALS = {
    "400": "the request is wrong; the sentence names the field",
    "401": "no API key, or none that is known",
    "404": "no such model or version, or not offered",
    "408": "the request did not arrive whole in time",
    "413": "the body, or what it would swell to, is larger than the bundle's limit",
    "415": "the body is of a type or coding the service does not read",
    "431": "the head of the request is too large",
    "500": "the service failed; its log has the details",
    "503": "no room now; try again as `retry-after` says",
    "504": "the deadline passed before the answer was computed",
}
_SUMMARIES = {
    "root": "The page for people, or that the service lives",
    "page_counters": "What the page for people shows of the service's work",
    "metrics": "What Prometheus reads",
    "openapi": "This document",
    "v1_models": "Names of the models",
    "v1_model": "Whether the model is ready",
    "predict": "Predictions for instances, through the model's codec",
    "server": "Name, version and extensions of the server",
    "live": "Whether the process answers",
    "ready": "Whether all models are ready",
    "models": "Names of the models",
    "model": "What the model takes and gives, and how it runs",
    "model_ready": "Whether the model is ready",
    "infer": "Inference on raw tensors (Open Inference Protocol)",
    "index": "All versions that are loaded",
    "texts_models": "Models that write texts, as OpenAI lists them",
    "texts_model": "One of them",
    "completions": "Texts that go on from prompts, as OpenAI has it; a stream of events where it is asked for",
    "chat": "The next message of a conversation, likewise",
}
_TEXTS = ("texts_models", "texts_model", "completions", "chat")


def document(plane: OnnxPlane, version: str, *, keys: bool) -> Schema:
    """For the models as they are now; `keys`: whether one is asked for."""
    paths: Schema = {}
    schemes: Schema = {"Error": _object(error=_TEXT)}
    writing = [one.name for one, current in plane.loaded() if current and one.writer is not None]
    if writing:
        schemes |= _texts_schemes(writing)
    for kind, (path, methods) in PATHS.items():
        if kind in _TEXTS and not writing:
            continue
        if _MODEL not in path:
            paths[path] = _item(kind, methods, "", _fixed(kind))
            continue
        for place, suffix, served in _places(plane, path):
            paths[place] = _item(kind, methods, suffix, _of_model(kind, served))
    for served, _ in plane.loaded():
        schemes |= _schemes(served)
    found: Schema = {
        "openapi": "3.1.0",
        "info": {"title": ", ".join(plane.names), "version": version},
        "paths": paths,
        "components": {"schemas": schemes},
    }
    return _with_keys(found) if keys else found


def _with_keys(document: Schema) -> Schema:
    """Every operation asks for one but what probes look at."""
    told = "an API key; the header `x-api-key: KEY` does as well"
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": told}}
    document["security"] = [{"key": []}]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if is_open(path, method.upper()):
                operation["security"] = []
            else:
                operation["responses"]["401"] = _refusal("401", "texts.Error" if "/openai/" in path else "Error")
                if method == "head":
                    operation["responses"]["401"].pop("content")
    return document


def _places(plane: OnnxPlane, path: str) -> Iterable[tuple[str, str, Served]]:
    """Where a path stands: by the model's name, and by each of its versions; with what sets its operations apart."""
    for served, current in plane.loaded():
        if served.writer is None and path.startswith("/openai"):
            continue
        place = _MODEL.replace("{model_name}", served.name)
        if current:
            yield path.replace(_MODEL, place), f".{served.name}", served
        suffix = f".{served.name}.{served.version}"
        yield path.replace(_MODEL, f"{place}/versions/{served.version}"), suffix, served


def _item(kind: str, methods: tuple[str, ...], suffix: str, told: Schema) -> Schema:
    return {
        method.lower(): {
            "operationId": f"{kind}{suffix}" if method != "HEAD" else f"{kind}{suffix}.head",
            "summary": _SUMMARIES[kind],
            **(told if method != "HEAD" else _without_bodies(told)),
        }
        for method in methods
    }


def _fixed(kind: str) -> Schema:
    """What is the same for every model."""
    if kind in _TEXTS:
        return _texts(kind)
    if kind == "root":
        alive = _json(_object(status={"const": "alive"}))
        return _answers({"content": {**alive["content"], "text/html": {"schema": _TEXT}}})
    if kind == "metrics":
        return _answers({"content": {name: {"schema": _TEXT} for name in _METRICS}})
    if kind == "index":
        entry = _object(name=_TEXT, version=_TEXT, state={"const": "READY"}, reason=_TEXT)
        body = {"type": "object", "additionalProperties": False, "properties": {"ready": _TRUTH}}
        told = _answers(_json({"type": "array", "items": entry}), "400", "413", "415", "431", "500")
        return {"requestBody": {"content": {"application/json": {"schema": body}}}, **told}
    if kind == "page_counters":
        return _answers(_json({"type": "object"}), "404")
    if kind == "ready":
        return _health(_object(ready=_TRUTH, live=_TRUTH))
    schema: dict[str, Schema] = {
        "openapi": {"type": "object"},
        "v1_models": _object(models={"type": "array", "items": _TEXT}),
        "models": _object(models={"type": "array", "items": _TEXT}),
        "live": _object(live={"const": True}),
        "server": _object(name=_TEXT, version=_TEXT, extensions={"type": "array", "items": _TEXT}),
    }
    return _answers(_json(schema[kind]))


def _of_model(kind: str, served: Served) -> Schema:
    if kind in _TEXTS:
        return _texts(kind)
    if kind in ("v1_model", "model_ready"):
        return _health(_object(name={"const": served.name}, ready=_TRUTH))
    if kind == "model":
        return _answers(_json(_ref(served, "Metadata")), "404")
    what = "Predict" if kind == "predict" else "Infer"
    asked, given = _json(_ref(served, f"{what}Request")), _json(_ref(served, f"{what}Answer"))
    if kind == "infer":
        asked["content"]["application/octet-stream"] = given["content"]["application/octet-stream"] = {
            "schema": {"type": "string", "format": "binary"}
        }
    told = _answers(given, *(code for code in _REFUSALS if code != "401"))
    return {"parameters": _REQUEST_HEADERS[kind], "requestBody": {"required": True, **asked}, **told}


_METRICS = ("text/plain", "application/openmetrics-text")
_WAIT = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "seconds after which nobody waits for the answer",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_LENGTH = {
    "name": "inference-header-content-length",
    "in": "header",
    "description": "length of the JSON, where raw tensors follow it (binary tensor data extension)",
    "schema": {"type": "integer", "minimum": 0},
}
_REQUEST_HEADERS = {"predict": [_WAIT], "infer": [_WAIT, _LENGTH]}


def _texts(kind: str) -> Schema:
    """OpenAI's paths, with refusals in OpenAI's form."""
    given = _json({"$ref": f"#/components/schemas/texts.{kind}.Answer"})
    if kind == "texts_models":
        return _answers(given)
    if kind == "texts_model":
        return _answers(given, "404", error="texts.Error")
    given["content"]["text/event-stream"] = {"schema": _TEXT}
    asked = _json({"$ref": f"#/components/schemas/texts.{kind}.Request"})
    told = _answers(given, *(code for code in _REFUSALS if code != "401"), error="texts.Error")
    return {"parameters": [_WAIT], "requestBody": {"required": True, **asked}, **told}


def _texts_schemes(names: list[str]) -> Schema:
    return {
        "texts.Error": texts_schemas.failure(),
        "texts.texts_models.Answer": texts_schemas.models(),
        "texts.texts_model.Answer": texts_schemas.model(),
        "texts.completions.Request": texts_schemas.completion_request(names),
        "texts.completions.Answer": texts_schemas.completion_answer(),
        "texts.chat.Request": texts_schemas.chat_request(names),
        "texts.chat.Answer": texts_schemas.chat_answer(),
    }


def _schemes(served: Served) -> Schema:
    signature, texts = served.bundle.signature, served.predictor.spoken
    spoken = [signature] if texts is None else [signature, texts]
    made = {
        "Metadata": schemas.metadata(signature, served.name),
        "PredictRequest": schemas.predict_request(signature),
        "PredictAnswer": schemas.predict_answer(),
        "InferRequest": _either([schemas.infer_request(one, served.name) for one in spoken]),
        "InferAnswer": _either([schemas.infer_answer(one, served.name, served.version) for one in spoken]),
    }
    return {f"{served.name}.{served.version}.{what}": schema for what, schema in made.items()}


def _either(found: list[Schema]) -> Schema:
    return found[0] if len(found) == 1 else {"anyOf": found}


def _ref(served: Served, what: str) -> Schema:
    return {"$ref": f"#/components/schemas/{served.name}.{served.version}.{what}"}


def _health(schema: Schema) -> Schema:
    told = _answers(_json(schema), "404")
    told["responses"]["503"] = {"description": "not ready", "headers": _HEADERS, **_json(schema)}
    return told


def _answers(content: Schema, *refusals: str, error: str = "Error") -> Schema:
    responses = {"200": {"description": "the answer", "headers": _HEADERS, **content}}
    return {"responses": responses | {code: _refusal(code, error) for code in refusals}}


def _refusal(code: str, scheme: str = "Error") -> Schema:
    error = _json({"$ref": f"#/components/schemas/{scheme}"})
    return {"description": _REFUSALS[code], "headers": _HEADERS, **error}


def _without_bodies(told: Schema) -> Schema:
    """What HEAD gives."""
    responses = told["responses"].items()
    return {
        "responses": {code: {key: one[key] for key in one if key != "content"} for code, one in responses},
    }


def _json(schema: Schema) -> Schema:
    return {"content": {"application/json": {"schema": schema}}}


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": list(properties),
        "additionalProperties": False,
        "properties": properties,
    }
