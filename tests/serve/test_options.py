"""A service with API keys and TLS, and options of `python -m serve` that override the bundle's settings."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from pipeline.contract.bundle import open_bundle
from pipeline.service.process import send_request
from pipeline.system.errors import ConfigError, InvalidPayload
from serve.model_version import ModelVersion
from serve.options import NamedBundle, parse_options
from serve.process.sockets import Address
from serve.runtime.batcher import BatchingOptions
from serve.runtime.loading import load_predictor
from serve.security import CertificatePair

from . import certificates
from .conftest import Launcher, Running

KEY, LATER = "a-key-of-the-tests-1", "a-key-of-the-tests-2"


@dataclass
class Closed:
    """A service with keys and TLS, and its files."""

    running: Running
    pair: CertificatePair
    keys: Path

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        context = ssl.create_default_context(cafile=str(self.pair.certificate))
        connection = http.client.HTTPSConnection("localhost", self.running.port, timeout=60, context=context)
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


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_probes_need_no_key(closed: Closed, path: str) -> None:
    assert closed.ask("GET", path)[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/models/tiny:predict"),
        ("POST", "/v2/models/tiny/infer"),
        ("GET", "/v2"),
        ("GET", "/v2/models/tiny"),
        ("GET", "/v2/models/tiny/ready"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
        ("GET", "/no/such/path"),
        ("DELETE", "/v2"),
    ],
)
def test_all_other_paths_need_a_key(closed: Closed, method: str, path: str) -> None:
    for headers in ({}, {"x_api_key": "not-a-key-of-the-tests"}):
        status, answered, body = closed.ask(method, path, **headers)
        assert (status, answered["www-authenticate"].split()[0]) == (401, "Bearer")
        assert "API key" in json.loads(body)["error"]
    assert closed.ask(method, path, authorization=f"Bearer {KEY}")[0] != 401


@pytest.mark.parametrize(
    "path", ["/v2/models/{}/ready", "/v2/models/{}", "/v2/models/{}/versions/1/ready", "/v1/models/{}", "/{}"]
)
def test_without_a_key_all_model_names_answer_alike(closed: Closed, path: str) -> None:
    answers = []
    for name in ("tiny", "other"):
        status, headers, body = closed.ask("GET", path.format(name), x_request_id="same")
        answers.append((status, {**headers, "date": ""}, body))
    assert answers[0] == answers[1]
    assert answers[0][0] == 401


def test_browser_gets_a_basic_authentication_challenge(closed: Closed) -> None:
    assert closed.ask("GET", "/", accept="text/html")[1]["www-authenticate"].startswith("Basic")


def test_authorized_prediction_is_not_cacheable(closed: Closed, picture: Any) -> None:
    status, headers, body = closed.ask("POST", "/v1/models/tiny:predict", {"instances": [picture]}, x_api_key=KEY)
    assert status == 200
    assert "digit" in json.loads(body)["predictions"][0]
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_plain_http_is_refused(closed: Closed) -> None:
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        send_request("127.0.0.1", closed.running.port, "GET", "/v2/health/live")


@pytest.fixture
def stub(closed: Closed) -> Iterator[Any]:
    credentials = grpc.ssl_channel_credentials(closed.pair.certificate.read_bytes())
    with grpc.secure_channel(f"localhost:{closed.running.grpc_port}", credentials) as channel:
        yield GRPCInferenceServiceStub(channel)


def test_grpc_requires_the_same_keys_over_the_same_tls(stub: Any) -> None:
    assert stub.ServerReady(pb.ServerReadyRequest(), timeout=60).ready
    for metadata in (None, [("x-api-key", "not-a-key-of-the-tests")]):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), metadata=metadata, timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "x-request-id" in dict(caught.value.trailing_metadata())
    for metadata in ([("x-api-key", KEY)], [("authorization", f"Bearer {KEY}")]):
        found = stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), metadata=metadata, timeout=60)
        assert found.name == "tiny"


def test_grpc_answers_all_model_names_alike_without_a_key(stub: Any) -> None:
    refusals = []
    for name in ("tiny", "other"):
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelReady(pb.ModelReadyRequest(name=name), timeout=60)
        refusals.append((caught.value.code(), caught.value.details()))
    ready = stub.ModelReady(pb.ModelReadyRequest(name="tiny"), metadata=[("x-api-key", KEY)], timeout=60)
    assert ready.ready
    assert refusals[0] == refusals[1]
    assert refusals[0][0] is grpc.StatusCode.UNAUTHENTICATED


def test_many_large_calls_over_tls_are_answered(stub: Any) -> None:
    tensor = {"name": "image", "datatype": "FP32", "shape": [16, 1, 8, 8]}
    sent = pb.ModelInferRequest(model_name="tiny", inputs=[tensor], raw_input_contents=[b"\0" * 4096], id="7" * 60_000)
    calls = [stub.ModelInfer.future(sent, metadata=[("x-api-key", KEY)], timeout=60) for _ in range(100)]
    assert {len(call.result().id) for call in calls} == {60_000}


def test_a_refused_key_is_counted_whatever_the_protocol(closed: Closed, stub: Any) -> None:
    with pytest.raises(grpc.RpcError):
        stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=60)
    assert (
        b'pipe_rejected_total{model="",reason="unauthorized",version=""}'
        in closed.ask("GET", "/metrics", x_api_key=KEY)[2]
    )


def test_grpc_without_tls_is_refused(closed: Closed) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{closed.running.grpc_port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.long  # the files are checked every five seconds
def test_new_keys_and_certificate_are_used_without_a_restart(
    closed: Closed, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    successor = certificates.make(tmp_path, "localhost")
    closed.keys.write_text(LATER + "\n")
    closed.pair.key.write_bytes(successor.key.read_bytes())
    closed.pair.certificate.write_bytes(successor.certificate.read_bytes())
    closed.running.wait_for("serve.api_keys changed: the new one is in use")
    closed.running.wait_for("serve.tls_certificate changed: the new one is in use")
    assert closed.ask("GET", "/v2", x_api_key=KEY)[0] == 401
    assert closed.ask("GET", "/v2", x_api_key=LATER)[0] == 200
    stub = request.getfixturevalue("stub")
    assert stub.ServerLive(pb.ServerLiveRequest(), timeout=60).live


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
def test_invalid_security_options_are_reported_at_once(
    start: Launcher, bundle_path: Path, options: list[str], sentence: str
) -> None:
    started = time.monotonic()
    running = start(bundle_path, options=options, ready=False)
    assert running.process.wait(300) == 2
    running.wait_for(f"error: {sentence}")
    assert time.monotonic() - started < 20


def test_by_default_the_service_is_local_and_grpc_is_one_port_above() -> None:
    options = parse_options(["bundle"])
    assert options.addresses == {"http": Address("127.0.0.1", 8080), "grpc": Address("127.0.0.1", 8081)}
    assert options.overrides == {}
    assert options.bundles == (NamedBundle("", Path("bundle").resolve()),)
    assert (options.canary, options.shadows) == (0.0, ())


def test_grpc_can_be_switched_off_and_standby_is_always_local() -> None:
    options = parse_options(["bundle", "--host", "0.0.0.0", "--grpc-port", "-1", "--standby", "9000"])
    assert options.addresses == {"http": Address("0.0.0.0", 8080), "standby": Address("127.0.0.1", 9000)}


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--port", "9000", "--standby", "9001"], "ports 9000, 9001, 9001: .* must differ"),
        (["--port", "65535"], "--grpc-port: 65536 is no port"),
        (["--grpc-port", "-2"], "--grpc-port: -2 is no port"),
        (["--standby", "8080"], "ports 8080, 8081, 8080: .*--standby must differ"),
    ],
)
def test_ports_that_cannot_work_are_a_config_error(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_options(["bundle", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--port", "0"],
        ["--port", "x"],
        ["--threads", "-1"],
        ["--provider", "tpu"],
        ["--canary", "200%"],
        ["--shadow-share", "2"],
        ["--max-waiting", "0"],
        ["--max-batch-size", "x"],
        ["--deadline-seconds", "nan"],
        ["--batch-delay-ms", "-1"],
    ],
)
def test_a_malformed_option_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(["bundle", *argv])
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_bundles_have_names_and_folders_may_contain_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run=3").mkdir()
    found = parse_options(["a=one", "b=/two", "run=3", "deep/run=4"]).bundles
    assert found == (
        NamedBundle("a", tmp_path / "one"),
        NamedBundle("b", Path("/two")),
        NamedBundle("", tmp_path / "run=3"),
        NamedBundle("", tmp_path / "deep/run=4"),
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["a b=bundle"], "'a b' is not a model name"),
        (["bundle", "--name", "../x"], "'../x' is not a model name"),
        (["one", "two", "--name", "a"], "--name: only for a single bundle"),
        (["a=one", "--name", "b"], "--name: only for a single bundle"),
    ],
)
def test_names_that_cannot_work_are_a_config_error(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_options(argv)


def test_canary_and_shadow_options_are_parsed() -> None:
    options = parse_options(["a=one", "a=two", "--canary", "10%", "--shadow", "a=three", "--shadow-share", "0.5"])
    assert (options.canary, options.shadow_share) == (0.1, 0.5)
    assert options.shadows == (NamedBundle("a", Path("three").resolve()),)


def test_empty_option_leaves_the_bundles_value() -> None:
    words = ("provider", "threads", "max-batch-size", "max-body-bytes", "max-waiting", "deadline-seconds", "batch-rows")
    assert parse_options(["bundle", *(f"--{word}=" for word in words)]).overrides == {}


MORE = ["--max-body-bytes", "5000", "--deadline-seconds", "0.5", "--max-cache-bytes", "9000"]
OPTIONS = ["--max-batch-size", "2", "--max-waiting", "7", "--batch-rows", "4", "--batch-delay-ms", "1.5"]


def test_options_override_the_bundles_settings(bundle_path: Path, pool: Executor) -> None:
    bundle = open_bundle(bundle_path)
    found = parse_options(["b", *OPTIONS, *MORE]).open(bundle_path)
    assert found.signature.limits.model_dump() == {
        "max_batch_size": 2,
        "max_body_bytes": 5000,
        "max_waiting": 7,
        "deadline_seconds": 0.5,
        "max_cache_bytes": 9000,
        "axes": {},
        "shortest": {},
    }
    assert found.signature.runtime.threads == bundle.signature.runtime.threads
    assert found.digest == bundle.digest
    served = ModelVersion("tiny", "1", load_predictor(found), pool)
    assert served.batcher.options == BatchingOptions(
        mergeable=True, max_rows=4, max_waiting=7, delay_seconds=0.0015, cpu_bound=True
    )
    assert served.predict_limits.size == 5000
    assert served.default_timeout_seconds == 0.5
    with pytest.raises(InvalidPayload, match="limit of 2"):
        served.predictor.decode(bundle.golden().instances * 3)
    assert parse_options(["b"]).open(bundle_path) == bundle
