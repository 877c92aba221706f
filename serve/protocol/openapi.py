"""What `/openapi.json` says of the service: every path of every version that is loaded, as strict as it is.

JSON schemas of what a model takes and gives, made from its signature: as strict as the service, no stricter.

JSON schemas of OpenAI's requests for texts and of their answers: what of them is understood here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.contract.signature import NUMPY_TYPES, Limits, Signature, TensorSpec
from serve.model_version import ModelVersion
from serve.models import OnnxPlane
from serve.routes import PATHS, is_open

Schema = dict[str, Any]

ANY_PARAMETERS: Schema = {
    "type": ["object", "null"],
    "additionalProperties": {"type": ["string", "number", "boolean"]},
    "description": "classification, shared memory and sequences are refused; what is unknown is passed over",
}
# The first numbers that go to infinity: half a step beyond the largest, and to BF16 it goes by way of float32.
_TOO_LARGE = {
    "FP16": 65520.0,
    "BF16": math.ldexp(2 - 2**-8 - 2**-24, 127),
    "FP32": math.ldexp(2 - 2**-24, 127),
}


def infer_request(signature: Signature, name: str) -> Schema:
    inputs: Schema = {"type": "array", "minItems": len(signature.inputs), "maxItems": len(signature.inputs)}
    tensors = [_given(spec, signature.limits) for spec in signature.inputs]
    if tensors:
        inputs["items"] = tensors[0] if len(tensors) == 1 else {"anyOf": tensors}
    if len(tensors) > 1:  # each of them, in any order
        inputs["allOf"] = [
            {"contains": {"type": "object", "required": ["name"], "properties": {"name": {"const": spec.name}}}}
            for spec in signature.inputs
        ]
    wish = _schema_object(
        {"name": {"enum": list(signature.output_names)}, "parameters": _parameters(binary_data={"type": "boolean"})},
        required=["name"],
    )
    return _schema_object(
        {
            "id": {"type": ["string", "null"], "description": "returned in the answer"},
            "model_name": {"enum": [name, None], "description": "as in the URL, where a client says it twice"},
            "parameters": _parameters(
                binary_data_output={"type": "boolean"}, timeout={"type": "integer", "minimum": 0}
            ),
            "inputs": inputs,
            "outputs": {
                "type": ["array", "null"],
                "items": wish,
                "description": "each at most once; none: all the model gives",
            },
        },
        required=["inputs"],
    )


def infer_answer(signature: Signature, name: str, version: str) -> Schema:
    return _schema_object(
        {
            "model_name": {"const": name},
            "model_version": {"const": version},
            "id": {"type": "string"},
            "outputs": {"type": "array", "items": {"anyOf": [_gives(spec) for spec in signature.outputs]}},
        },
        required=["model_name", "model_version", "outputs"],
    )


def predict_request(signature: Signature) -> Schema:
    instances = {
        "type": "array",
        "minItems": 1,
        "maxItems": signature.limits.max_batch_size,
        "items": {},
        "description": "whatever the model's codec reads: the model's card and its page show an example",
    }
    return _schema_object({"instances": instances}, required=["instances"])


def predict_answer() -> Schema:
    return _schema_object({"predictions": {"type": "array", "items": {}}}, required=["predictions"])


def metadata(signature: Signature, name: str) -> Schema:
    texts = {"type": "array", "items": {"type": "string"}}
    tensors = {
        "type": "array",
        "items": _schema_object(
            {
                "name": {"type": "string"},
                "datatype": {"enum": list(NUMPY_TYPES)},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
            },
            required=["name", "datatype", "shape"],
        ),
    }
    return _schema_object(
        {
            "name": {"const": name},
            "versions": texts,
            "platform": {"type": "string"},
            "inputs": {**tensors, "minItems": len(signature.inputs), "maxItems": len(signature.inputs)},
            "outputs": {**tensors, "minItems": len(signature.outputs), "maxItems": len(signature.outputs)},
            "properties": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        required=["name", "versions", "platform", "inputs", "outputs", "properties"],
    )


def _given(spec: TensorSpec, limits: Limits) -> Schema:
    return _schema_object(
        {
            "name": {"const": spec.name},
            "shape": {
                "type": "array",
                "minItems": len(spec.shape),
                "maxItems": len(spec.shape),
                "prefixItems": [_size(axis, place, limits) for place, axis in enumerate(spec.shape)],
            },
            "datatype": {"const": spec.datatype},
            "parameters": _parameters(),
            "data": _data(spec, limits),
        },
        required=["name", "shape", "datatype", "data"],
    )


def _gives(spec: TensorSpec) -> Schema:
    element = {**_element(spec.datatype)}
    if element["type"] == "number":
        element = {"type": ["number", "null"]}  # JSON has no NaN and no infinity
    axes = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return _schema_object(
        {
            "name": {"const": spec.name},
            "shape": {**axes, "minItems": len(spec.shape), "maxItems": len(spec.shape)},
            "datatype": {"const": spec.datatype},
            "data": {"type": "array", "items": element},
        },
        required=["name", "shape", "datatype", "data"],
    )


def _size(axis: int | str, place: int, limits: Limits) -> Schema:
    if isinstance(axis, int):
        return {"const": axis}
    if place == 0:
        return {"type": "integer", "minimum": 1, "maximum": limits.max_batch_size}
    least, most = _bounds(axis, place, limits)
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def _data(spec: TensorSpec, limits: Limits) -> Schema:
    """Flat, or nested as the shape is; as many elements as the shape says, which a schema cannot say in full."""
    element, sizes = _element(spec.datatype), [_bounds(axis, at, limits) for at, axis in enumerate(spec.shape)]
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
    return (1, limits.axes[axis]) if axis in limits.axes else (0, None)


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
    edge = _TOO_LARGE.get(datatype)
    return {"type": "number"} if edge is None else {
        "type": "number", "exclusiveMinimum": -edge, "exclusiveMaximum": edge,
    }  # fmt: skip


def _parameters(**known: Schema) -> Schema:
    return {**ANY_PARAMETERS, "properties": known} if known else ANY_PARAMETERS


def _schema_object(properties: Schema, required: Sequence[str]) -> Schema:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": properties}


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


def _places(plane: OnnxPlane, path: str) -> Iterable[tuple[str, str, ModelVersion]]:
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


def _of_model(kind: str, served: ModelVersion) -> Schema:
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
        "texts.Error": failure(),
        "texts.texts_models.Answer": models(),
        "texts.texts_model.Answer": model(),
        "texts.completions.Request": completion_request(names),
        "texts.completions.Answer": completion_answer(),
        "texts.chat.Request": chat_request(names),
        "texts.chat.Answer": chat_answer(),
    }


def _schemes(served: ModelVersion) -> Schema:
    signature, texts = served.bundle.signature, served.predictor.spoken
    spoken = [signature] if texts is None else [signature, texts]
    made = {
        "Metadata": metadata(signature, served.name),
        "PredictRequest": predict_request(signature),
        "PredictAnswer": predict_answer(),
        "InferRequest": _either([infer_request(one, served.name) for one in spoken]),
        "InferAnswer": _either([infer_answer(one, served.name, served.version) for one in spoken]),
    }
    return {f"{served.name}.{served.version}.{what}": schema for what, schema in made.items()}


def _either(found: list[Schema]) -> Schema:
    return found[0] if len(found) == 1 else {"anyOf": found}


def _ref(served: ModelVersion, what: str) -> Schema:
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


_NULLABLE_TRUTH: Schema = {"type": ["boolean", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_WORD: Schema = {"type": "string", "minLength": 1}


def failure() -> Schema:
    told = {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    return _completion_object({"error": _completion_object(told)})


def models() -> Schema:
    return _completion_object({"object": {"const": "list"}, "data": {"type": "array", "items": model()}})


def model() -> Schema:
    return _completion_object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT})


def completion_request(names: Sequence[str]) -> Schema:
    ids = {"type": "array", "items": _COUNT, "minItems": 1}
    prompts: list[Schema] = [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, ids]
    return _request(
        names,
        {
            "prompt": {"anyOf": [*prompts, {"type": "array", "items": ids, "minItems": 1}]},
            "max_tokens": _nullable(0, told="of the answer; 16 where nothing is said"),
            "logprobs": _nullable(0, 20, "likeliest tokens told beside each"),
            "echo": _NULLABLE_TRUTH,
        },
        ["prompt"],
    )


def chat_request(names: Sequence[str]) -> Schema:
    part = _completion_object({"type": {"const": "text"}, "text": _TEXT})
    message = {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": part}]},
        "name": {"type": ["string", "null"]},
    }
    return _request(
        names,
        {
            "messages": {"type": "array", "minItems": 1, "items": _completion_object(message, ["role", "content"])},
            "max_tokens": _nullable(1, told="of the answer; as many as there is room for where nothing is said"),
            "max_completion_tokens": _nullable(1, told="the same under its newer name"),
            "logprobs": _NULLABLE_TRUTH,
            "top_logprobs": _nullable(0, 20, "likeliest tokens told beside each"),
        },
        ["messages"],
    )


def completion_answer() -> Schema:
    return _answer("text_completion", {"text": _TEXT})


def chat_answer() -> Schema:
    message = _completion_object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
    return _answer("chat.completion", {"message": message})


def _request(names: Sequence[str], own: Schema, required: Sequence[str]) -> Schema:
    stop: list[Schema] = [_WORD, {"type": "array", "items": _WORD, "maxItems": 16}, {"type": "null"}]
    known: Schema = {
        "model": {
            "anyOf": [{"enum": list(names)}, {"type": "string", "pattern": "^[^/]+/versions/[0-9A-Za-z]{1,64}$"}]
        },
        "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _nullable(-1, told="0 and -1: any of them"),
        "n": _nullable(1, told="texts for each prompt"),
        "seed": _nullable(-(2**63), 2**63 - 1, "the same draws for the same seed"),
        "stop": {"anyOf": stop},
        "stream": _NULLABLE_TRUTH,
        "stream_options": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
        },
        "user": {"description": "as some other fields of OpenAI's: changes nothing"},
    }
    return _completion_object({**known, **own}, ["model", *required])


def _answer(kind: str, own: Schema) -> Schema:
    choice = {"index": _COUNT, **own, "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length"]}}  # fmt: skip  # noqa: E501
    usage = {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT}
    return _completion_object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": {"type": "array", "items": _completion_object(choice)},
            "usage": _completion_object(usage),
        }
    )


def _nullable(least: int, most: int | None = None, told: str = "") -> Schema:
    bounds = {"minimum": least} | ({} if most is None else {"maximum": most})
    return {"type": ["integer", "null"], **bounds, "description": told}


def _completion_object(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    return {
        "type": "object",
        "required": list(properties if required is None else required),
        "additionalProperties": False,
        "properties": properties,
    }
