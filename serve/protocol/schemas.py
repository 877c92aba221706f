"""JSON schemas of what a model takes and gives, made from its signature: as strict as the service, no stricter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.spec.signature import NUMPY_TYPES, Limits, Signature, TensorSpec

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
    wish = _object(
        {"name": {"enum": list(signature.output_names)}, "parameters": _parameters(binary_data={"type": "boolean"})},
        required=["name"],
    )
    return _object(
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
    return _object(
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
    return _object({"instances": instances}, required=["instances"])


def predict_answer() -> Schema:
    return _object({"predictions": {"type": "array", "items": {}}}, required=["predictions"])


def metadata(signature: Signature, name: str) -> Schema:
    texts = {"type": "array", "items": {"type": "string"}}
    tensors = {
        "type": "array",
        "items": _object(
            {
                "name": {"type": "string"},
                "datatype": {"enum": list(NUMPY_TYPES)},
                "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
            },
            required=["name", "datatype", "shape"],
        ),
    }
    return _object(
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
    return _object(
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
    return _object(
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


def _object(properties: Schema, required: Sequence[str]) -> Schema:
    return {"type": "object", "required": list(required), "additionalProperties": False, "properties": properties}
