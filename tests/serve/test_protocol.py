"""Versions, probes and repository calls as the protocols have them, sent to the real service over HTTP and gRPC."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

from pipeline.contract import __version__
from pipeline.contract.bundle import Bundle
from serve.grpc import open_inference

if TYPE_CHECKING:
    from tests.serve.conftest import Running


INPUT = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": [0.5] * 64}
RAW = {"name": "image", "shape": [1, 1, 8, 8], "datatype": "FP32"}


def _versions(bundle: Bundle) -> list[str]:
    return ["1", bundle.digest[:8], bundle.digest[:12].upper(), bundle.digest]


@pytest.mark.parametrize("path", ["/v2/models/tiny", "/v2/models/tiny/ready", "/v1/models/tiny"])
def test_version_is_found_by_number_or_digest_prefix(client: httpx.Client, bundle: Bundle, path: str) -> None:
    place = path.replace("/tiny", "/tiny/versions/{}")
    plain = client.get(path).json()
    for version in _versions(bundle):
        response = client.get(place.format(version))
        assert (response.status_code, response.json()) == (200, plain)
        assert response.headers["x-bundle-digest"] == bundle.digest
    for version in ("2", "0", bundle.digest[:7], "0123456789", "latest"):
        response = client.get(place.format(version))
        assert response.status_code == 404
        assert f"no version {version!r}; there are 1 ({bundle.digest[:12]})" in response.json()["error"]


def test_inference_answer_has_the_version_number(client: httpx.Client, stub: Any, bundle: Bundle) -> None:
    for version in _versions(bundle):
        answer = client.post(f"/v2/models/tiny/versions/{version}/infer", json={"inputs": [INPUT]}).json()
        assert answer["model_version"] == "1"
        request = pb.ModelInferRequest(
            model_name="tiny", model_version=version, inputs=[RAW], raw_input_contents=[bytes(256)]
        )
        assert stub.ModelInfer(request, timeout=60).model_version == "1"


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.ModelReady(pb.ModelReadyRequest(name="tiny", version="7"), timeout=60),
        lambda stub: stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny", version="7"), timeout=60),
        lambda stub: stub.ModelInfer(pb.ModelInferRequest(model_name="tiny", model_version="7"), timeout=60),
        lambda stub: stub.ModelReady(pb.ModelReadyRequest(name="other"), timeout=60),
        lambda stub: stub.ModelMetadata(pb.ModelMetadataRequest(name="../tiny"), timeout=60),
        lambda stub: stub.ModelInfer(pb.ModelInferRequest(model_name=""), timeout=60),
    ],
)
def test_an_unknown_version_or_model_is_not_found_over_grpc(stub: Any, call: Any) -> None:
    with pytest.raises(grpc.RpcError, match="there are") as caught:
        call(stub)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_metadata_is_the_same_over_grpc_to_its_last_field(client: httpx.Client, stub: Any) -> None:
    wanted = client.get("/v2/models/tiny").json()
    found = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny", version="1"), timeout=60)
    assert [found.name, found.platform, list(found.versions)] == [wanted["name"], wanted["platform"], ["1"]]
    for mine, theirs in ((found.inputs, wanted["inputs"]), (found.outputs, wanted["outputs"])):
        assert [{"name": x.name, "datatype": x.datatype, "shape": list(x.shape)} for x in mine] == theirs
    complete = open_inference.ModelMetadataResponse.FromString(found.SerializeToString())  # kserve lacks properties
    assert dict(complete.properties) == wanted["properties"]
    server = stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=60)
    assert {"name": server.name, "version": server.version, "extensions": list(server.extensions)} == client.get(
        "/v2"
    ).json()


def test_the_index_lists_every_version(client: httpx.Client) -> None:
    wanted = [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}]
    for body in (b"", b" ", b"{}", b'{"ready": true}', b'{"ready": false}', b'{"ready": null}'):
        assert client.post("/v2/repository/index", content=body).json() == wanted
    for body in (b"[]", b"null", b'{"ready": 1}', b'{"ready": "true"}', b'{"all": true}', b"{"):
        assert client.post("/v2/repository/index", content=body).status_code == 400


def test_body_of_raw_bytes_is_the_only_input(client: httpx.Client) -> None:
    image = np.full((1, 1, 8, 8), 0.5, np.float32)
    headers = {"inference-header-content-length": "0", "content-type": "application/octet-stream"}
    response = client.post("/v2/models/tiny/infer", content=image.tobytes(), headers=headers)
    place = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    (output,) = json.loads(response.content[:place])["outputs"]
    assert (output["name"], output["parameters"]) == ("logits", {"binary_data_size": 40})
    found = np.frombuffer(response.content[place:], np.float32)
    as_json = client.post("/v2/models/tiny/infer", json={"inputs": [INPUT]}).json()["outputs"][0]["data"]
    np.testing.assert_array_equal(found, np.array(as_json, np.float32))
    assert client.post("/v2/models/tiny/infer", content=b"ab", headers=headers).status_code == 400


@pytest.mark.parametrize("rows", [1, 2])
def test_classification_is_the_same_over_http_and_grpc(client: httpx.Client, stub: Any, rows: int) -> None:
    image = np.random.default_rng(rows).random((rows, 1, 8, 8)).astype(np.float32)
    tensor = {**RAW, "shape": list(image.shape)}
    request = {"inputs": [{**tensor, "data": image.ravel().tolist()}]}
    logits = client.post("/v2/models/tiny/infer", json=request).json()["outputs"][0]["data"]
    wish = {"name": "logits", "parameters": {"classification": 3}}
    (output,) = client.post("/v2/models/tiny/infer", json={**request, "outputs": [wish]}).json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [rows, 3])
    scores = np.array(logits, np.float32).reshape(rows, 10)
    order = np.argsort(-scores, axis=1)[:, :3]
    assert output["data"] == [f"{scores[row, i]!s}:{i}:{i}" for row, best in enumerate(order) for i in best]
    message = pb.ModelInferRequest(model_name="tiny", inputs=[tensor])
    message.inputs[0].contents.fp32_contents.extend(image.ravel().tolist())
    message.outputs.add(name="logits").parameters["classification"].int64_param = 3
    (answer,) = stub.ModelInfer(message, timeout=60).outputs
    assert (answer.datatype, list(answer.shape)) == ("BYTES", [rows, 3])
    assert [text.decode() for text in answer.contents.bytes_contents] == output["data"]


def test_statistics_are_the_same_over_http_and_grpc(client: httpx.Client, server: Running) -> None:
    before = client.get("/v2/models/tiny/stats").json()["model_stats"][0]["inference_stats"]["success"]["count"]
    for _ in range(3):
        assert client.post("/v2/models/tiny/infer", json={"inputs": [INPUT]}).status_code == 200
    (statistics,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] == before + 3
    assert statistics["execution_count"] > 0
    for path in ("/v2/models/stats", "/v2/models/tiny/versions/1/stats"):
        assert client.get(path).json() == {"model_stats": [statistics]}
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/{open_inference.SERVICE}/ModelStatistics", response_deserializer=lambda data: data
        )
        for name, version in (("", ""), ("tiny", ""), ("tiny", "1")):
            request = open_inference.message_class("ModelStatisticsRequest")(name=name, version=version)
            answer = open_inference.ModelStatisticsResponse.FromString(call(request.SerializeToString(), timeout=60))
            assert answer == open_inference.ModelStatisticsResponse(model_stats=[statistics])
    assert client.get("/v2/models/other/stats").status_code == 404
    assert client.get("/v2/models/tiny/versions/9/stats").status_code == 404


def test_server_reports_the_version_of_the_package_and_its_extensions(client: httpx.Client) -> None:
    extensions = ["binary_tensor_data", "classification", "statistics"]
    assert client.get("/v2").json() == {"name": "pipe", "version": __version__, "extensions": extensions}


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/openapi.json", "/v1/models", "/v2", "/v2/", "/v2/health/ready", "/v2/models/tiny"]
)
def test_head_has_the_headers_of_get_and_no_body(client: httpx.Client, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    if path != "/metrics":  # whose counters change with each request
        assert head.headers["content-length"] == str(len(got.content))
    assert head.headers["content-type"] == got.headers["content-type"]
    assert client.get("/v2/health/live").json() == {"live": True}  # on the same connection, in step
