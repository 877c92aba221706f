"""A service that asks for keys and speaks TLS, asked by clients that do, by clients that do not, and renewed."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.service import request
from serve.tls import Pair

from . import certificates
from .conftest import Launcher, Running

KEY, LATER = "a-key-of-the-tests-1", "a-key-of-the-tests-2"


@dataclass
class Closed:
    """The service, and the files it was given."""

    running: Running
    pair: Pair
    keys: Path

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        context = ssl.create_default_context(cafile=str(self.pair.certificate))
        connection = http.client.HTTPSConnection("localhost", self.running.port, timeout=20, context=context)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def closed(bundle_path: Path, module_launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Closed:
    folder = tmp_path_factory.mktemp("door")
    pair, keys = certificates.make(folder, "localhost"), folder / "keys"
    keys.write_text(KEY + "\n")
    options = ["--api-keys", str(keys), "--tls-certificate", str(pair.certificate), "--tls-key", str(pair.key)]
    return Closed(module_launcher(bundle_path, options=options), pair, keys)


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"])
def test_probes_need_no_key(closed: Closed, path: str) -> None:
    assert closed.ask("GET", path)[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models/tiny:predict"),
        ("POST", "/v2/models/tiny/infer"),
        ("GET", "/v2"),
        ("GET", "/v2/models/tiny"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
        ("GET", "/no/such/path"),
        ("DELETE", "/v2"),
    ],
)
def test_all_else_needs_one(closed: Closed, method: str, path: str) -> None:
    for headers in ({}, {"x_api_key": "not-a-key-of-the-tests"}):
        status, answered, body = closed.ask(method, path, **headers)
        assert (status, answered["www-authenticate"].split()[0]) == (401, "Bearer")
        assert "API key" in json.loads(body)["error"]
    assert closed.ask(method, path, authorization=f"Bearer {KEY}")[0] != 401


def test_a_browser_is_told_to_ask_for_the_key(closed: Closed) -> None:
    assert closed.ask("GET", "/", accept="text/html")[1]["www-authenticate"].startswith("Basic")


def test_a_prediction_with_a_key_is_as_ever_and_not_kept(closed: Closed, picture: Any) -> None:
    status, headers, body = closed.ask("POST", "/v1/models/tiny:predict", {"instances": [picture]}, x_api_key=KEY)
    assert status == 200
    assert "digit" in json.loads(body)["predictions"][0]
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_plain_http_is_not_spoken(closed: Closed) -> None:
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        request("127.0.0.1", closed.running.port, "GET", "/v2/health/live")


def _stub(closed: Closed) -> tuple[grpc.Channel, GRPCInferenceServiceStub]:
    credentials = grpc.ssl_channel_credentials(closed.pair.certificate.read_bytes())
    channel = grpc.secure_channel(f"localhost:{closed.running.grpc_port}", credentials)
    return channel, GRPCInferenceServiceStub(channel)


def test_grpc_asks_for_the_same_keys_over_the_same_tls(closed: Closed) -> None:
    channel, stub = _stub(closed)
    with channel:
        assert stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready
        for metadata in (None, [("x-api-key", "not-a-key-of-the-tests")]):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), metadata=metadata, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "x-request-id" in dict(caught.value.trailing_metadata())
        for metadata in ([("x-api-key", KEY)], [("authorization", f"Bearer {KEY}")]):
            found = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), metadata=metadata, timeout=20)
            assert found.name == "tiny"


def test_many_large_calls_over_tls_are_answered(closed: Closed) -> None:
    channel, stub = _stub(closed)
    tensor = {"name": "image", "datatype": "FP32", "shape": [16, 1, 8, 8]}
    asked = pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[b"\0" * 4096], id="7" * 60_000)
    with channel:
        calls = [stub.ModelInfer.future(asked, metadata=[("x-api-key", KEY)], timeout=20) for _ in range(100)]
        assert {len(call.result().id) for call in calls} == {60_000}


def test_a_refused_key_is_counted_whatever_the_protocol(closed: Closed) -> None:
    channel, stub = _stub(closed)
    with channel, pytest.raises(grpc.RpcError):
        stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=20)
    assert (
        b'pipe_rejected_total{model="",reason="unauthorized",version=""}'
        in closed.ask("GET", "/metrics", x_api_key=KEY)[2]
    )


def test_grpc_without_tls_is_not_spoken(closed: Closed) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{closed.running.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.long  # the files are looked at every five seconds
def test_new_keys_and_a_new_certificate_are_taken_up_without_a_restart(closed: Closed, tmp_path: Path) -> None:
    successor = certificates.make(tmp_path, "localhost")
    closed.keys.write_text(LATER + "\n")
    closed.pair.key.write_bytes(successor.key.read_bytes())
    closed.pair.certificate.write_bytes(successor.certificate.read_bytes())
    closed.running.wait_for("serve.api_keys changed: the new one is in use")
    closed.running.wait_for("serve.tls_certificate changed: the new one is in use")
    assert closed.ask("GET", "/v2", x_api_key=KEY)[0] == 401
    assert closed.ask("GET", "/v2", x_api_key=LATER)[0] == 200
    channel, stub = _stub(closed)
    with channel:
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=20).live


def test_no_key_is_ever_logged(closed: Closed) -> None:
    assert KEY not in closed.running.log
    assert LATER not in closed.running.log


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--api-keys", "/absent/keys"], "serve.api_keys: /absent/keys: cannot be read"),
        (["--tls-certificate", "/absent/pem"], "--tls-certificate and --tls-key go together"),
        (["--tls-certificate", "/absent/pem", "--tls-key", "/absent/key"], "serve.tls_certificate /absent/pem"),
    ],
)
def test_what_is_wrong_with_the_door_is_said_at_once(
    start: Launcher, bundle_path: Path, options: list[str], sentence: str
) -> None:
    started = time.monotonic()
    running = start(bundle_path, options=options, ready=False)
    assert running.process.wait(30) == 2
    running.wait_for(f"error: {sentence}")
    assert time.monotonic() - started < 20
