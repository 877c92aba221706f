"""Requests no client should send, as raw bytes to the real service: each a 4xx with a sentence, and no harm done."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.spec.bundle import Bundle
from pipeline.spec.golden import difference

if TYPE_CHECKING:
    from tests.serve.conftest import Running

V1, V2 = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
JSON = {"content-type": "application/json"}
BINARY = "inference-header-content-length"


def _image(**changes: Any) -> dict[str, Any]:
    return {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64} | changes


def _v2(*inputs: Any, **fields: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **fields}).encode()


def _v1(instances: Any) -> bytes:
    return json.dumps({"instances": instances}).encode()


ROW, PICTURE = [1] * 8, [[1] * 8] * 8
RAW = _v2({"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "parameters": {"binary_data_size": 256}})

# path, body, headers, status, what the sentence must name
CASES: list[tuple[str, bytes, dict[str, str], int, str]] = [
    (V1, b"", JSON, 400, "body"),
    (V1, b"{", JSON, 400, "body"),
    (V1, b"null", JSON, 400, "body"),
    (V1, b"[]", JSON, 400, "body"),
    (V1, b'"text"', JSON, 400, "body"),
    (V1, b"{}", JSON, 400, "instances"),
    (V1, b'{"instances": NaN}', JSON, 400, "body"),
    (V1, b'{"instances": [1e999]}', JSON, 400, "body"),
    (V1, b"\xff\xfe{}", JSON, 400, "body"),
    (V1, b'{"instances": "\\ud800"}', JSON, 400, "body"),
    (V1, b'{"instances": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", JSON, 400, "body"),
    (V1, b'{"instances": ' + b"[" * 900 + b"]" * 900 + b"}", JSON, 400, "instances"),
    (V1, b'{"instances": [[], []], "instances": 3}', JSON, 400, "instances"),
    (V1, b'{"instance": [1]}', JSON, 400, "instances"),
    (V1, _v1(None), JSON, 400, "instances"),
    (V1, _v1({}), JSON, 400, "instances"),
    (V1, _v1([]), JSON, 400, "instances"),
    (V1, _v1([[]]), JSON, 400, "instances"),
    (V1, _v1([None]), JSON, 400, "instances"),
    (V1, _v1([{}]), JSON, 400, "instances"),
    (V1, _v1(["a"]), JSON, 400, "instances"),
    (V1, _v1([10**400]), JSON, 400, "body"),
    (V1, _v1([PICTURE, ROW]), JSON, 400, "instances"),
    (V1, _v1([[[17] * 8] * 8]), JSON, 400, "instances"),
    (V1, _v1([PICTURE] * 17), JSON, 400, "instances"),
    (V1, b'{"instances": [], "parameters": {}}', JSON, 400, "parameters"),
    (V1, _v1([PICTURE]), {"content-type": "text/plain"}, 415, "content-type"),
    (V1, _v1([PICTURE]), {"content-type": "application/json; charset=utf-16"}, 415, "content-type"),
    (V1, _v1([PICTURE]), {"content-type": ""}, 415, "content-type"),
    (V1, _v1([PICTURE]), JSON | {"content-encoding": "br"}, 415, "content-encoding"),
    (V1, b" " * 100_001, JSON, 413, "body"),
    (V1, b"{}", JSON | {"content-length": "-5"}, 400, ""),
    ("/v1/models/other:predict", _v1([PICTURE]), JSON, 404, "other"),
    ("/v1/models/tiny:explain", _v1([PICTURE]), JSON, 404, "explain"),
    ("/v1/models/%00%ff:predict", _v1([PICTURE]), JSON, 404, "odel"),
    ("/v2/models/tiny/versions/7/infer", _v2(_image()), JSON, 404, "no version '7'"),
    ("/v2/models/other/infer", _v2(_image()), JSON, 404, "other"),
    ("/v2/health/ready", b"{}", JSON, 405, "/v2/health/ready"),
    (V2, b"{}", JSON, 400, "inputs"),
    (V2, b'{"inputs": {}}', JSON, 400, "inputs"),
    (V2, _v2(), JSON, 400, "image"),
    (V2, _v2(1), JSON, 400, "inputs.0"),
    (V2, _v2(_image(), _image()), JSON, 400, "image"),
    (V2, _v2(_image(), _image(name="more")), JSON, 400, "more"),
    (V2, _v2(_image(name="picture")), JSON, 400, "picture"),
    (V2, _v2(_image(name=7)), JSON, 400, "inputs.0.name"),
    (V2, _v2(_image(datatype="FP64")), JSON, 400, "datatype"),
    (V2, _v2(_image(datatype="fp32")), JSON, 400, "datatype"),
    (V2, _v2(_image(datatype=None)), JSON, 400, "datatype"),
    (V2, _v2(_image(shape=[64])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[1, 1, 4, 16])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[-1, 1, 8, 8])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[1.5, 1, 8, 8])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[True, 1, 8, 8])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[2**63, 2**63, 8, 8])), JSON, 400, "shape"),
    (V2, _v2(_image(shape=[2, 1, 8, 8])), JSON, 400, "image"),
    (V2, _v2(_image(shape=[0, 1, 8, 8], data=[])), JSON, 400, "image"),
    (V2, _v2(_image(shape=[17, 1, 8, 8], data=[0] * 64 * 17)), JSON, 400, "limit of 16"),
    (V2, _v2(_image(data=[0] * 63)), JSON, 400, "image"),
    (V2, _v2(_image(data=["0"] * 64)), JSON, 400, "image"),
    (V2, _v2(_image(data=[None] * 64)), JSON, 400, "image"),
    (V2, _v2(_image(data=[True] * 64)), JSON, 400, "image"),
    (V2, _v2(_image(data=[1e300] * 64)), JSON, 400, "image"),
    (V2, _v2(_image(data=None)), JSON, 400, "data"),
    (V2, _v2(_image(data={"0": 1})), JSON, 400, "inputs.0.data"),
    (V2, _v2(_image(extra=1)), JSON, 400, "extra"),
    (V2, _v2(_image(), outputs=[{"name": "probabilities"}]), JSON, 400, "probabilities"),
    (V2, _v2(_image(), outputs=[{"name": "logits"}] * 2), JSON, 400, "logits"),
    (V2, _v2(_image(), outputs="logits"), JSON, 400, "outputs"),
    (V2, _v2(_image(), id=5), JSON, 400, "id"),
    (V2, _v2(_image(), parameters=[]), JSON, 400, "parameters"),
    (V2, _v2(_image(parameters={"binary_data_size": 4})), JSON, 400, "binary_data_size"),
    (V2, RAW, JSON, 400, "binary_data_size"),
    (V2, RAW + b"\0" * 256, {BINARY: "abc"}, 400, BINARY),
    (V2, RAW + b"\0" * 256, {BINARY: str(len(RAW) + 257)}, 400, BINARY),
    (V2, RAW + b"\0" * 255, {BINARY: str(len(RAW))}, 400, "binary_data_size"),
    (V2, RAW + b"\0" * 257, {BINARY: str(len(RAW))}, 400, "1 raw bytes"),
    (V2, RAW + b"\0" * 256, {BINARY: str(len(RAW) - 1)}, 400, "body"),
    (V2, RAW + b"\0" * 256, {"content-type": "application/octet-stream"}, 415, "content-type"),
]  # fmt: skip


def _post(server: Running, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    is_json = response.headers.get_content_type() == "application/json"
    return response.status, json.loads(text) if is_json else {"error": text.decode()}


@pytest.mark.parametrize(("path", "body", "headers", "status", "named"), CASES)
def test_a_malformed_request_is_refused_with_a_sentence_that_names_the_field(
    server: Running, path: str, body: bytes, headers: dict[str, str], status: int, named: str
) -> None:
    found, answer = _post(server, path, body, headers)
    assert found == status, answer
    assert named in answer["error"]
    assert "Traceback" not in answer["error"]


def test_after_all_of_them_the_golden_request_still_gets_its_golden_answer(server: Running, bundle: Bundle) -> None:
    for path, body, headers, _, _ in CASES:
        _post(server, path, body, headers)
    golden = bundle.golden()
    status, answer = _post(server, V1, _v1(golden.instances), JSON)
    assert status == 200
    assert difference(golden.predictions, answer["predictions"], golden.rtol, golden.atol) is None
    assert "Traceback" not in server.log
