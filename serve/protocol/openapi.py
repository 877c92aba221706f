"""The document at `/openapi.json`: every path of every loaded version, exactly as strict as the service.

The schemas of requests and answers are derived from the model's signature. OpenAI's are those of the supported fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipeline.contract.signature import NUMPY_TYPES, Limits, Signature, TensorSpec
from serve.model_version import ModelVersion
from serve.models import ModelRepository
from serve.protocol.classification import MAX_CLASSES, classes_spec, is_classifiable
from serve.protocol.embeddings import EmbeddingRequest
from serve.protocol.v1 import SIGNATURE_NAME
from serve.protocol.validate import format_shape
from serve.routes import PATHS, needs_no_key

Schema = dict[str, Any]
RouteSchemas = Mapping[str, tuple[type[msgspec.Struct], Callable[[], Schema]]]  # of a request and its answer
ANY_PARAMETERS: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean"]},
    "description": "shared memory and sequences are rejected; unknown parameters are ignored",
}
# The smallest numbers that are rounded to infinity; BF16 is rounded from float32.
_INFINITE_FROM = {"FP16": 65520.0, "BF16": math.ldexp(2 - 2**-8 - 2**-24, 127), "FP32": math.ldexp(2 - 2**-24, 127)}
_MODEL = "/models/{model_name}"
TEXT: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_HEADERS = {
    "x-request-id": {
        "schema": TEXT,
        "description": "the request's own id if it is valid, else a new one; also in the log",
    },
    "x-bundle-digest": {"schema": TEXT, "description": "digest of the bundle that answered"},
}
_ERROR_DESCRIPTIONS = {
    "400": "the request is invalid; the message names the field",
    "401": "missing or unknown API key",
    "404": "unknown model or version, or not offered",
    "408": "the request did not arrive in time",
    "413": "the body, its tensors, or what its JSON becomes, are larger than the model takes",
    "415": "unsupported content type or encoding of the body",
    "429": "this address had too many large bodies refused; small ones are answered",
    "431": "the request headers are too large",
    "500": "internal error; the log has the details",
    "503": "overloaded; try again after `retry-after` seconds",
    "504": "the deadline passed before the answer was computed",
}
_SUMMARIES = {
    "root": "Page for browsers, or a liveness answer",
    "page_counters": "Counters for the page",
    "metrics": "Metrics for Prometheus",
    "openapi": "This document",
    "v1_models": "Names of the models",
    "v1_model": "Readiness of the model",
    "predict": "Predict instances through the model's codec",
    "server": "Name, version and extensions of the server",
    "live": "Liveness",
    "ready": "Readiness of all models",
    "models": "Names of the models",
    "model": "Inputs, outputs and properties of the model",
    "model_ready": "Readiness of the model",
    "infer": "Inference on raw tensors (Open Inference Protocol)",
    "index": "All loaded versions",
    "feedback": "Store the label of an earlier request, by its x-request-id",
    "statistics": "Counts and durations of all models (Triton's statistics extension)",
    "model_statistics": "Counts and durations of the model (Triton's statistics extension)",
    "texts_models": "Language models, as OpenAI lists them",
    "texts_model": "One language model",
    "completions": "Completions of prompts, optionally as a stream of events",
    "chat": "Chat completions, optionally as a stream of events",
    "embeddings": "Vectors of texts",
}
_OPENAI_KINDS = ("texts_models", "texts_model", "completions", "chat", "embeddings")
_OPENAI_EXAMPLES: dict[str, Schema] = {
    "completions": {"prompt": "Once upon a time", "max_tokens": 16},
    "chat": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16},
    "embeddings": {"input": ["Hello!"]},
}
_METRICS = ("text/plain", "application/openmetrics-text")
_TIMEOUT_HEADER = {
    "name": "x-request-timeout",
    "in": "header",
    "description": "deadline in seconds",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
_JSON_LENGTH_HEADER = {
    "name": "inference-header-content-length",
    "in": "header",
    "description": "length of the JSON if raw tensors follow it (binary tensor data extension)",
    "schema": {"type": "integer", "minimum": 0},
}
_REQUEST_HEADERS = {"predict": [_TIMEOUT_HEADER], "infer": [_TIMEOUT_HEADER, _JSON_LENGTH_HEADER]}
_BODY_ERRORS = ("400", "413", "415", "429", "431", "500")
COUNT: Schema = {"type": "integer", "minimum": 0}
_NONEMPTY: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "items": COUNT, "minItems": 1}
_LISTS: list[Schema] = [{"type": "array", "items": TEXT, "minItems": 1}, _IDS, {**_IDS, "items": _IDS}]
_TEXTS: Schema = {"anyOf": [TEXT, *_LISTS]}
_STOP: Schema = {"anyOf": [_NONEMPTY, {"type": "array", "items": _NONEMPTY, "maxItems": 16}, {"type": "null"}]}
_STRICTER = {"prompt": _TEXTS, "input": _TEXTS, "stop": _STOP}  # than the types of OpenAI's requests can say
_VERSIONED_NAME = "^[^/]+/versions/[0-9A-Za-z]{1,64}$"


def document(
    repository: ModelRepository, server_version: str, texts: RouteSchemas, *, keys: bool, labels: bool = False
) -> Schema:
    """Return the document for the loaded models; `keys`: whether it requires an API key, `labels`: takes labels."""
    paths: Schema = {}
    schemas: Schema = {"Error": object_schema({"error": TEXT})}
    by_kind: dict[str, list[str]] = {}  # names of the models that answer each route of OpenAI's API
    for version, current in repository.loaded_versions():
        for kind in version.openai_kinds if current else ():
            by_kind.setdefault(kind, []).append(version.name)
    offered = {*by_kind, *(("texts_models", "texts_model") if by_kind else ())}
    schemas |= _openai_schemas(by_kind, {**texts, "embeddings": (EmbeddingRequest, embedding_answer)})
    for kind, (path, methods) in PATHS.items():
        if (kind in _OPENAI_KINDS and kind not in offered) or (kind == "feedback" and not labels):
            continue
        if _MODEL not in path:
            paths[path] = _path_item(kind, methods, "", _server_operation(kind))
            continue
        for url, suffix, version in _model_paths(repository, path):
            paths[url] = _path_item(kind, methods, suffix, _model_operation(kind, version))
    for version, _ in repository.loaded_versions():
        schemas |= _model_schemas(version)
    result: Schema = {
        "openapi": "3.1.0",
        "info": {"title": ", ".join(repository.names), "version": server_version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    return _add_api_key(result) if keys else result


def _add_api_key(document: Schema) -> Schema:
    """Require a key for every operation except those for probes."""
    key = {"type": "http", "scheme": "bearer", "description": "an API key; the header `x-api-key: KEY` works as well"}
    document["components"]["securitySchemes"] = {"key": key}
    document["security"] = [{"key": []}]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if needs_no_key(path, method.upper()):
                operation["security"] = []
            else:
                operation["responses"]["401"] = _error_response("401", "texts.Error" if "/openai/" in path else "Error")
                if method == "head":
                    operation["responses"]["401"].pop("content")
    return document


def _model_paths(repository: ModelRepository, path: str) -> Iterable[tuple[str, str, ModelVersion]]:
    """Yield each path of a template with a suffix for its operation ids: by model, and by version."""
    for version, current in repository.loaded_versions():
        if not version.openai_kinds and path.startswith("/openai"):
            continue
        model = _MODEL.replace("{model_name}", version.name)
        if current:
            yield path.replace(_MODEL, model), f".{version.name}", version
        suffix = f".{version.name}.{version.version}"
        yield path.replace(_MODEL, f"{model}/versions/{version.version}"), suffix, version


def _path_item(kind: str, methods: tuple[str, ...], suffix: str, operation: Schema) -> Schema:
    return {
        method.lower(): {
            "operationId": f"{kind}{suffix}" if method != "HEAD" else f"{kind}{suffix}.head",
            "summary": _SUMMARIES[kind],
            **(operation if method != "HEAD" else _without_bodies(operation)),
        }
        for method in methods
    }


def _server_operation(kind: str) -> Schema:
    """Return an operation that does not depend on a model."""
    if kind in _OPENAI_KINDS:
        return _openai_operation(kind)
    if kind == "root":
        alive = _json(object_schema({"status": {"const": "alive"}}))
        return _responses({"content": {**alive["content"], "text/html": {"schema": TEXT}}})
    if kind == "metrics":
        return _responses({"content": {name: {"schema": TEXT} for name in _METRICS}})
    if kind == "index":
        state = {"enum": ["READY", "UNAVAILABLE"]}
        entry = object_schema({"name": TEXT, "version": TEXT, "state": state, "reason": TEXT})
        body = {"type": "object", "additionalProperties": False, "properties": {"ready": {"type": ["boolean", "null"]}}}
        responses = _responses(_json({"type": "array", "items": entry}), *_BODY_ERRORS)
        request = {"content": {"application/json": {"schema": body, "example": {"ready": True}}}}
        return {"requestBody": request, **responses}
    if kind == "feedback":
        body = object_schema({"id": {"type": "string", "minLength": 1, "maxLength": 128}, "label": {}})
        responses = _responses(_json(object_schema({"stored": {"const": True}})), *_BODY_ERRORS)
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}, **responses}
    if kind == "page_counters":
        return _responses(_json({"type": "object"}), "404")
    if kind == "ready":
        return _health(object_schema({"ready": _BOOLEAN, "live": _BOOLEAN}))
    schema: dict[str, Schema] = {
        "openapi": {"type": "object"},
        "v1_models": object_schema({"models": {"type": "array", "items": TEXT}}),
        "models": object_schema({"models": {"type": "array", "items": TEXT}}),
        "live": object_schema({"live": {"const": True}}),
        "statistics": statistics(),
        "server": object_schema({"name": TEXT, "version": TEXT, "extensions": {"type": "array", "items": TEXT}}),
    }
    return _responses(_json(schema[kind]))


def _model_operation(kind: str, version: ModelVersion) -> Schema:
    if kind in _OPENAI_KINDS:
        return _openai_operation(kind)
    if kind in ("v1_model", "model_ready"):
        return _health(object_schema({"name": {"const": version.name}, "ready": _BOOLEAN}))
    if kind == "model_statistics":
        return _responses(_json(statistics()), "404")
    if kind == "model":
        return _responses(_json(_ref(version, "Metadata")), "404")
    what = "Predict" if kind == "predict" else "Infer"
    request, answer = _json(_ref(version, f"{what}Request")), _json(_ref(version, f"{what}Answer"))
    if (example := version.examples.get(kind)) is not None:
        request["content"]["application/json"]["example"] = example
    binary: Schema = {"type": "string", "format": "binary"}
    if kind == "predict":
        file = {"schema": {**binary, "description": "one instance"}}
        request["content"] |= dict.fromkeys(version.predictor.media_types, file)
    else:
        for side in (request, answer):
            side["content"]["application/octet-stream"] = {"schema": binary}
    responses = _responses(answer, *(code for code in _ERROR_DESCRIPTIONS if code != "401"))
    return {"parameters": _REQUEST_HEADERS[kind], "requestBody": {"required": True, **request}, **responses}


def _openai_operation(kind: str) -> Schema:
    """Return an operation of OpenAI's API, with its error format."""
    answer = _json({"$ref": f"#/components/schemas/texts.{kind}.Answer"})
    if kind == "texts_models":
        return _responses(answer)
    if kind == "texts_model":
        return _responses(answer, "404", error="texts.Error")
    if kind != "embeddings":
        answer["content"]["text/event-stream"] = {"schema": TEXT}
    request = _json({"$ref": f"#/components/schemas/texts.{kind}.Request"})
    responses = _responses(answer, *(code for code in _ERROR_DESCRIPTIONS if code != "401"), error="texts.Error")
    return {"parameters": [_TIMEOUT_HEADER], "requestBody": {"required": True, **request}, **responses}


def _health(schema: Schema) -> Schema:
    responses = _responses(_json(schema), "404")
    responses["responses"]["503"] = {"description": "not ready", "headers": _HEADERS, **_json(schema)}
    return responses


def _responses(content: Schema, *refusals: str, error: str = "Error") -> Schema:
    responses = {"200": {"description": "the answer", "headers": _HEADERS, **content}}
    return {"responses": responses | {code: _error_response(code, error) for code in refusals}}


def _error_response(code: str, schema: str = "Error") -> Schema:
    error = _json({"$ref": f"#/components/schemas/{schema}"})
    return {"description": _ERROR_DESCRIPTIONS[code], "headers": _HEADERS, **error}


def _without_bodies(operation: Schema) -> Schema:
    """Return the responses to HEAD."""
    responses = {}
    for code, response in operation["responses"].items():
        responses[code] = {key: value for key, value in response.items() if key != "content"}
    return {"responses": responses}


def _json(schema: Schema) -> Schema:
    return {"content": {"application/json": {"schema": schema}}}


def _ref(version: ModelVersion, name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{version.name}.{version.version}.{name}"}


def _model_schemas(version: ModelVersion) -> Schema:
    signature, for_texts = version.bundle.signature, version.predictor.text_signature
    signatures = [signature] if for_texts is None else [signature, for_texts]
    schemas = {
        "Metadata": metadata(signature, version.name),
        "PredictRequest": predict_request(signature),
        "PredictAnswer": object_schema({"predictions": {"type": "array", "items": {}}}),
        "InferRequest": _either([infer_request(each, version.name) for each in signatures]),
        "InferAnswer": _either([infer_answer(each, version.name, version.version) for each in signatures]),
    }
    return {f"{version.name}.{version.version}.{name}": schema for name, schema in schemas.items()}


def _openai_schemas(by_kind: Mapping[str, Sequence[str]], schemas: RouteSchemas) -> Schema:
    """Return the schemas of the routes that some model answers."""
    result: Schema = {"texts.Error": error_response()} if by_kind else {}
    if by_kind:
        result |= {"texts.texts_models.Answer": models(), "texts.texts_model.Answer": model()}
    for kind, names in by_kind.items():
        parsed_as, answer = schemas[kind]
        example = {"model": names[0], **_OPENAI_EXAMPLES[kind]}
        result[f"texts.{kind}.Request"] = _openai_request(parsed_as, names) | {"examples": [example]}
        result[f"texts.{kind}.Answer"] = answer()
    return result


def metadata(signature: Signature, name: str) -> Schema:
    shape = {"type": "array", "items": {"type": "integer", "minimum": -1}}
    tensor = object_schema({"name": TEXT, "datatype": {"enum": list(NUMPY_TYPES)}, "shape": shape})
    fields = {
        "name": {"const": name},
        "versions": {"type": "array", "items": TEXT},
        "platform": TEXT,
        "inputs": _array(tensor, (len(signature.inputs), len(signature.inputs))),
        "outputs": _array(tensor, (len(signature.outputs), len(signature.outputs))),
        "properties": {"type": "object", "additionalProperties": TEXT},
    }
    return object_schema(fields)


def statistics() -> Schema:
    duration = object_schema({"count": COUNT, "ns": COUNT})
    durations = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    batch = object_schema({"batch_size": COUNT, **dict.fromkeys(durations[3:], duration)})
    version = {
        "name": TEXT,
        "version": TEXT,
        "last_inference": {**COUNT, "description": "milliseconds since the epoch"},
        "inference_count": {**COUNT, "description": "rows that were computed"},
        "execution_count": {**COUNT, "description": "runs of the model"},
        "inference_stats": object_schema(dict.fromkeys((*durations, "cache_hit", "cache_miss"), duration)),
        "batch_stats": {"type": "array", "items": batch},
    }
    return object_schema({"model_stats": {"type": "array", "items": object_schema(version)}})


def predict_request(signature: Signature) -> Schema:
    instances = {
        "type": "array",
        "minItems": 1,
        "maxItems": signature.limits.max_batch_size,
        "items": {},
        "description": "instances for the model's codec; the model card and the page at / show an example",
    }
    fields = {"instances": instances, "signature_name": {"enum": [SIGNATURE_NAME, None]}}
    return object_schema(fields, required=["instances"])


def infer_request(signature: Signature, name: str) -> Schema:
    inputs: Schema = {"type": "array", "minItems": len(signature.inputs), "maxItems": len(signature.inputs)}
    tensors = [_input_tensor(spec, signature.limits) for spec in signature.inputs]
    if tensors:
        inputs["items"] = tensors[0] if len(tensors) == 1 else {"anyOf": tensors}
    if len(tensors) > 1:  # each exactly once, in any order
        inputs["allOf"] = [
            {"contains": {"type": "object", "required": ["name"], "properties": {"name": {"const": spec.name}}}}
            for spec in signature.inputs
        ]
    classes = {
        **COUNT,
        "maximum": MAX_CLASSES,
        "description": "number of largest values to return as `value:index[:label]`, 0 for the tensor",
    }
    parameters = _parameters(binary_data=_BOOLEAN, classification=classes)
    output = object_schema({"name": {"enum": list(signature.output_names)}, "parameters": parameters}, ["name"])
    outputs = {"type": ["array", "null"], "items": output, "description": "each at most once; empty: all outputs"}
    fields = {
        "id": {"type": ["string", "null"], "description": "returned in the answer"},
        "model_name": {"enum": [name, None], "description": "optional; must be the name in the URL"},
        "parameters": _parameters(binary_data_output=_BOOLEAN, timeout=COUNT),
        "inputs": inputs,
        "outputs": outputs,
    }
    return object_schema(fields, required=["inputs"])


def infer_answer(signature: Signature, name: str, version: str) -> Schema:
    # Those of numbers again as strings: their largest values (`classification`).
    classes = [classes_spec(spec) for spec in signature.outputs if is_classifiable(spec)]
    outputs = {"type": "array", "items": {"anyOf": [*map(_output_tensor, (*signature.outputs, *classes))]}}
    fields = {"model_name": {"const": name}, "model_version": {"const": version}, "id": TEXT, "outputs": outputs}
    return object_schema(fields, required=["model_name", "model_version", "outputs"])


def _either(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _input_tensor(spec: TensorSpec, limits: Limits) -> Schema:
    sizes = [_size(axis, place, limits) for place, axis in enumerate(spec.shape)]
    axes = {"type": "array", "description": format_shape(spec.shape)}
    fields = {
        "name": {"const": spec.name},
        "shape": {**axes, "minItems": len(sizes), "maxItems": len(sizes), "prefixItems": sizes},
        "datatype": {"const": spec.datatype},
        "parameters": _parameters(),
        "data": _data(spec, limits),
    }
    return object_schema(fields, required=["name", "shape", "datatype", "data"])


def _output_tensor(spec: TensorSpec) -> Schema:
    element = _element(spec.datatype)
    if element["type"] == "number":
        element = {"type": ["number", "null"]}  # JSON has no NaN and no infinity
    axes = {"type": "array", "description": format_shape(spec.shape), "items": {"type": "integer", "minimum": 0}}
    shape = {**axes, "minItems": len(spec.shape), "maxItems": len(spec.shape)}
    data = {"type": "array", "items": element}
    return object_schema(
        {"name": {"const": spec.name}, "shape": shape, "datatype": {"const": spec.datatype}, "data": data}
    )


def _size(axis: int | str, place: int, limits: Limits) -> Schema:
    if isinstance(axis, int):
        return {"const": axis}
    least, most = _bounds(axis, place, limits)
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def _data(spec: TensorSpec, limits: Limits) -> Schema:
    """Return the schema of data: flat or nested. JSON Schema cannot express that its size must match the shape."""
    element = _element(spec.datatype)
    if spec.allows_missing:
        element |= {"type": ["number", "null"], "description": "null is a missing number"}
    sizes = [_bounds(axis, at, limits) for at, axis in enumerate(spec.shape)]
    least = math.prod(size[0] for size in sizes)
    most = math.prod(size[1] for size in sizes) if all(size[1] is not None for size in sizes) else None
    flat = _array(element, (least, most))
    if len(sizes) < 2:
        return flat
    nested = element
    for size in reversed(sizes):
        nested = _array(nested, size)
    return {"anyOf": [flat, nested]}


def _bounds(axis: int | str, place: int, limits: Limits) -> tuple[int, Any]:
    if isinstance(axis, int):
        return axis, axis
    if place == 0:
        return 1, limits.max_batch_size
    return (limits.shortest.get(axis, 1), limits.axes[axis]) if axis in limits.axes else (0, None)


def _array(items: Schema, size: tuple[int, int | None]) -> Schema:
    most = {} if size[1] is None else {"maxItems": size[1]}
    return {"type": "array", "items": items, "minItems": size[0], **most}


def _element(datatype: str) -> Schema:
    if datatype in ("BOOL", "BYTES"):
        return {"type": "boolean" if datatype == "BOOL" else "string"}
    kind = np.dtype(NUMPY_TYPES[datatype])
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    edge = _INFINITE_FROM.get(datatype)
    return {"type": "number"} | ({} if edge is None else {"exclusiveMinimum": -edge, "exclusiveMaximum": edge})


def _parameters(**properties: Schema) -> Schema:
    return {**ANY_PARAMETERS, "properties": properties} if properties else ANY_PARAMETERS


def _openai_request(parsed_as: type[msgspec.Struct], names: Sequence[str]) -> Schema:
    """Return the schema of the class that requests are parsed as; a field that may be left out may be null."""
    (_,), schemas = msgspec.json.schema_components([parsed_as], ref_template="{name}")
    schema: Schema = _with_parts(schemas.pop(parsed_as.__name__), schemas)
    required, properties = schema["required"], schema["properties"].items()
    null: Schema = {"type": "null"}
    fields = {}
    for name, field in properties:
        choices = field.get("anyOf", [field])
        fields[name] = field if name in required or null in choices else {"anyOf": [*choices, null]}
    fields |= {name: field for name, field in _STRICTER.items() if name in fields}
    fields["model"] = {"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": _VERSIONED_NAME}]}
    fields["user"] = {"description": "ignored, like some other fields of OpenAI"}
    return schema | {"properties": fields}


def _with_parts(schema: Any, parts: Schema) -> Any:
    """Return the schema with the schemas of other classes in the place of their names."""
    if isinstance(schema, list):
        return [_with_parts(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _with_parts(parts[schema["$ref"]], parts)
    return {key: _with_parts(value, parts) for key, value in schema.items()}


def embedding_answer() -> Schema:
    vector = {"anyOf": [{"type": "array", "items": {"type": ["number", "null"]}}, TEXT]}
    entry = object_schema({"object": {"const": "embedding"}, "index": COUNT, "embedding": vector})
    usage = object_schema({"prompt_tokens": COUNT, "total_tokens": COUNT})
    data = {"type": "array", "items": entry}
    return object_schema({"object": {"const": "list"}, "data": data, "model": TEXT, "usage": usage})


def models() -> Schema:
    return object_schema({"object": {"const": "list"}, "data": {"type": "array", "items": model()}})


def model() -> Schema:
    return object_schema({"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT})


def error_response() -> Schema:
    optional = {"type": ["string", "null"]}
    fields = object_schema({"message": TEXT, "type": TEXT, "param": optional, "code": optional})
    return object_schema({"error": fields})


def object_schema(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    return {
        "type": "object",
        "required": list(properties if required is None else required),
        "additionalProperties": False,
        "properties": properties,
    }
