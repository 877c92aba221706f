from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import numpy as np
import pytest

from pipeline.contract.signature import Limits, Runtime, Signature, TensorSpec
from pipeline.system.errors import InvalidPayload
from serve.protocol import openapi
from serve.protocol.tensors import InferRequest, Tensor
from serve.routes import PATHS, find_route

if TYPE_CHECKING:
    from tests.serve.conftest import Running


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    return found


def test_every_described_path_exists(document: dict[str, Any]) -> None:
    named = {find_route(path, method.upper()).kind for path, item in document["paths"].items() for method in item}
    assert named == set(PATHS) - {"texts_models", "texts_model", "completions", "chat", "embeddings", "feedback"}, (
        "this model does not generate or embed texts, and the service takes no labels"
    )
    assert "/v2/models/tiny/infer" in document["paths"]
    assert "/v2/models/tiny/versions/1/infer" in document["paths"]
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


def test_answers_match_the_document(document: dict[str, Any], server: Running) -> None:
    for path, item in document["paths"].items():
        if "get" not in item or path in ("/metrics", "/openapi.json"):
            continue
        schema = item["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(httpx.get(server.url + path, timeout=60).json(), _whole(schema, document))


def test_examples_are_valid_requests(document: dict[str, Any], server: Running) -> None:
    for path in ("/v1/models/tiny:predict", "/v2/models/tiny/infer"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        jsonschema.validate(content["example"], _whole(content["schema"], document))
        assert httpx.post(server.url + path, json=content["example"], timeout=60).status_code == 200


def _whole(schema: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "components": document["components"]}


IMAGE = TensorSpec(name="image", datatype="FP32", shape=("batch", 2))
TOKENS = TensorSpec(name="tokens", datatype="INT8", shape=("batch", "length"))
REQUEST = {
    "id": "1",
    "model_name": "tiny",
    "parameters": {"timeout": 5},
    "inputs": [
        {"name": "tokens", "shape": [1, 3], "datatype": "INT8", "data": [[1, -128, 127]]},
        {"name": "image", "shape": [1, 2], "datatype": "FP32", "data": [0, 3.4028235e38]},
    ],
    "outputs": [{"name": "image", "parameters": {"binary_data": False}}],
}


def _signature(*inputs: TensorSpec) -> Signature:
    limits, runtime = Limits(max_batch_size=2, max_body_bytes=1000), Runtime(provider="cpu", threads=1)
    return Signature(inputs=inputs, outputs=(IMAGE,), codec="C", limits=limits, runtime=runtime)


def _with(path: str, value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(REQUEST)
    *way, last = path.split(".")
    place = changed
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    place[int(last) if last.isdigit() else last] = value
    found: dict[str, Any] = changed
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_valid_request_in_any_order_of_inputs(order: int) -> None:
    given = {**REQUEST, "inputs": REQUEST["inputs"][::order]}  # type: ignore[index]
    jsonschema.validate(given, openapi.infer_request(_signature(IMAGE, TOKENS), "tiny"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", 5),
        ("model_name", "other"),
        ("extra", 1),
        ("inputs.0.datatype", "INT16"),
        ("inputs.0.name", "image"),
        ("inputs.0.name", "other"),
        ("inputs.0.data", [[128, 0, 0]]),
        ("inputs.0.data", [[1.5, 0, 0]]),
        ("inputs.0.data", [[True, 0, 0]]),
        ("inputs.0.data", [[[1, 2, 3]]]),
        ("inputs.0.shape", [3, 1]),
        ("inputs.0.shape", [0, 3]),
        ("inputs.0.shape", [1]),
        ("inputs.1.shape", [1, 3]),
        ("inputs.1.data", [0]),
        ("inputs.1.data", [0, 0, 0, 0, 0]),
        ("inputs.1.data", [0, 3.4028236e38]),
        ("inputs.1.data", ["0", 0]),
        ("inputs", []),
        ("outputs.0.name", "other"),
        ("outputs.0.parameters", {"binary_data": 1}),
        ("parameters", {"timeout": -1}),
        ("parameters", {"a": []}),
    ],
)
def test_request_rejected_by_the_service_is_invalid(path: str, value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(_with(path, value), openapi.infer_request(_signature(IMAGE, TOKENS), "tiny"))


@pytest.mark.parametrize(("shortest", "longest", "fits"), [(1, 3, True), (1, 2, False), (3, 4, True), (4, 5, False)])
def test_named_axis_is_limited(shortest: int, longest: int, fits: bool) -> None:
    signature = _signature(IMAGE, TOKENS)
    limits = signature.limits.model_copy(update={"axes": {"length": longest}, "shortest": {"length": shortest}})
    schema = openapi.infer_request(signature.model_copy(update={"limits": limits}), "tiny")
    assert jsonschema.Draft202012Validator(schema).is_valid(REQUEST) is fits


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_number_is_the_same_in_schema_and_service(datatype: Any, sign: float) -> None:
    spec = TensorSpec(name="x", datatype=datatype, shape=(1,))
    edge = openapi._INFINITE_FROM[datatype]
    below = float(np.nextafter(edge, 0)) * sign
    schema = openapi.infer_request(_signature(spec), "tiny")["properties"]["inputs"]["items"]["properties"]["data"]
    jsonschema.validate([below], schema)
    assert np.isfinite(_converted(spec, below)).all()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([edge * sign], schema)
    with pytest.raises(InvalidPayload, match="outside the range"):
        _converted(spec, edge * sign)


def test_null_is_valid_where_a_number_may_be_missing() -> None:
    strict = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))
    for spec in (strict, strict.model_copy(update={"allows_missing": True})):
        schema = openapi.infer_request(_signature(spec), "tiny")["properties"]["inputs"]["items"]["properties"]["data"]
        for data in ([1.0, None], [[None, 1.0]]):
            assert jsonschema.Draft202012Validator(schema).is_valid(data) is spec.allows_missing
        for wrong in (["1", None], [1e39, None], None):
            assert not jsonschema.Draft202012Validator(schema).is_valid(wrong)


def _converted(spec: TensorSpec, number: float) -> Any:
    return InferRequest("", [Tensor("x", spec.datatype, (1,), [number])], []).arrays(_signature(spec))["x"]
