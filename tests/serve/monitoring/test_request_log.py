"""Metrics, request IDs and the log of the real service."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from prometheus_client.parser import text_string_to_metric_families

from pipeline.contract.bundle import Bundle

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running


PREDICT = "/v1/models/tiny:predict"


def _sample(server: Running, name: str, **labels: str) -> float:
    """Return the sum of the samples of that name with these labels."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def _post(server: Running, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{PREDICT}", json=body, headers=headers, timeout=60)


def _message(**fields: Any) -> Any:
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8]}
    return pb.ModelInferRequest(**({"model_name": "tiny"} | fields), inputs=[tensor], raw_input_contents=[b"\0" * 256])


def test_prediction_is_counted_once_in_every_metric(server: Running, picture: list[Any]) -> None:
    sent = [
        ("pipe_requests_total", {"protocol": "v1", "code": "200", "model": "tiny"}),
        ("pipe_request_seconds_count", {"protocol": "v1"}),
        ("pipe_batch_requests_sum", {}),
        *[("pipe_phase_seconds_count", {"phase": phase}) for phase in ("read", "wait", "run", "write")],
    ]
    before, rows = [_sample(server, name, **labels) for name, labels in sent], _sample(server, "pipe_batch_rows_sum")
    assert _post(server, {"instances": [picture, picture]}).status_code == 200
    assert [_sample(server, name, **labels) for name, labels in sent] == [value + 1 for value in before]
    assert _sample(server, "pipe_batch_rows_sum") == rows + 2
    assert _sample(server, "pipe_requests_in_flight") == 0


def test_refused_requests_are_counted_by_reason(server: Running) -> None:
    before = _sample(server, "pipe_rejected_total", reason="invalid", model="tiny")
    assert _post(server, {}).status_code == 400
    assert _sample(server, "pipe_rejected_total", reason="invalid", model="tiny") == before + 1
    assert httpx.post(f"{server.url}/v1/models/none:predict", json={}, timeout=60).status_code == 404
    assert _sample(server, "pipe_requests_total", code="404", model="") >= 1


def test_a_grpc_call_is_counted_and_answered_with_its_id(server: Running, bundle: Bundle) -> None:
    before = _sample(server, "pipe_requests_total", protocol="grpc", code="OK", model="tiny")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = GRPCInferenceServiceStub(channel).ModelInfer
        _, call = infer.with_call(_message(), timeout=60, metadata=[("x-request-id", "mine-7")])
        found = dict(call.trailing_metadata())
        assert (found["x-request-id"], found["x-bundle-digest"]) == ("mine-7", bundle.digest)
        with pytest.raises(grpc.RpcError) as refused:
            infer(_message(model_name="none"), timeout=60)
        assert dict(refused.value.trailing_metadata())["x-request-id"]
    assert _sample(server, "pipe_requests_total", protocol="grpc", code="OK", model="tiny") == before + 1
    assert _sample(server, "pipe_requests_total", protocol="grpc", code="NOT_FOUND", model="") >= 1


def test_bundle_and_provider_are_reported(server: Running, bundle: Bundle) -> None:
    labels = {"digest": bundle.digest, "provider": "CPUExecutionProvider", "verdict": "pass", "version": "1"}
    assert _sample(server, "pipe_bundle_info", **labels) == 1
    assert _sample(server, "process_resident_memory_bytes") > 10e6


@pytest.mark.parametrize("path", ["/", "/nowhere", "/v2/health/ready", "/metrics", PREDICT])
def test_every_response_has_the_clients_request_id_or_a_new_one(server: Running, path: str) -> None:
    url = f"{server.url}{path}"
    assert httpx.get(url, headers={"x-request-id": "abc.1"}, timeout=60).headers["x-request-id"] == "abc.1"
    made = [httpx.get(url, headers={"x-request-id": "not sane"}, timeout=60).headers["x-request-id"] for _ in range(2)]
    assert len({*made, "not sane"}) == 3


def test_oversized_body_is_refused_with_its_request_id(server: Running) -> None:
    response = httpx.post(f"{server.url}{PREDICT}", content=b" " * 100_001, headers={"x-request-id": "big"}, timeout=60)
    assert (response.status_code, response.headers["x-request-id"]) == (413, "big")
    assert _sample(server, "pipe_rejected_total", reason="size") >= 1


def test_invalid_http_head_is_counted_and_gets_an_id(server: Running) -> None:
    before = _sample(server, "pipe_rejected_total", reason="http_400")
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(b"HELLO\r\n\r\n")
        head = connection.makefile("rb").read().partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 400 ")
    (received,) = re.findall(rb"\r\nx-request-id: (\S+)", head)
    server.wait_for(f"request_id={received.decode()}")
    assert _sample(server, "pipe_rejected_total", reason="http_400") == before + 1


def test_json_log_has_failed_requests_and_a_share_of_others(
    start: Launcher, tricky_path: Path, picture: list[Any]
) -> None:
    server = start(tricky_path, options=["--log-format", "json", "--log-requests", "1"], ready=False)
    server.wait_for('"message": "ready"')
    assert _post(server, {"instances": [{"image": picture}]}, **{"x-request-id": "good-1"}).status_code == 200
    failed = _post(server, {"instances": [{"image": picture, "fail": "encode"}]})
    assert failed.status_code == 500
    assert "secret" not in failed.text
    assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines]
    received = [line for line in lines if line.get("request_id") == failed.headers["x-request-id"]]
    assert [line["message"] for line in received] == ["request failed", "request"]
    assert "a secret of the server" in received[0]["traceback"]
    assert (received[1]["code"], received[1]["level"]) == (500, "warning")
    (good,) = [line for line in lines if line.get("request_id") == "good-1"]
    assert (good["path"], good["protocol"], good["model"], good["version"], good["code"]) == (
        PREDICT,
        "v1",
        "tiny",
        "1",
        200,
    )
