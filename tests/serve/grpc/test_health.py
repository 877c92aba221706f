"""The health service, called with the client code of grpcio-health-checking."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub

from serve.grpc import health
from tests.serve.load_clients import SECONDS

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher, Running

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def server(module_launcher: Launcher, bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A service that requires a key, except for health."""
    (keys := tmp_path_factory.mktemp("keys") / "keys").write_text("a-key-that-is-hard-to-guess\n")
    return module_launcher(bundle_path, options=["--api-keys", str(keys)])


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return HealthStub(channel)


def _request(service: str) -> Any:
    return pb.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService", "grpc.health.v1.Health"])
def test_check_reports_readiness_without_a_key(stub: Any, service: str) -> None:
    assert stub.Check(_request(service), timeout=SECONDS).status == SERVING


def test_list_reports_the_status_of_every_service(stub: Any, channel: grpc.Channel) -> None:
    response = health.FILE.message_class("HealthListResponse")
    listing = channel.unary_unary("/grpc.health.v1.Health/List", response_deserializer=response.FromString)
    statuses = listing(b"", timeout=SECONDS).statuses
    assert {name: each.status for name, each in statuses.items()} == dict.fromkeys(
        ("", "inference.GRPCInferenceService", "grpc.health.v1.Health"), SERVING
    )


def test_check_of_unknown_service_is_not_found(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(_request("other"), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no service 'other'; there are inference.GRPCInferenceService" in caught.value.details()


@pytest.mark.parametrize(("service", "status"), [("", SERVING), ("other", pb.HealthCheckResponse.SERVICE_UNKNOWN)])
def test_watch_reports_the_status_at_once_and_stays_open(stub: Any, service: str, status: int) -> None:
    watch = stub.Watch(_request(service), timeout=SECONDS)
    assert next(watch).status == status
    assert stub.Check(_request(""), timeout=SECONDS).status == SERVING
    assert watch.is_active()
    watch.cancel()
    assert stub.Check(_request(""), timeout=SECONDS).status == SERVING


def test_one_watch_is_ended_if_there_are_too_many(stub: Any) -> None:
    ended = threading.Event()
    watches = [stub.Watch(_request(""), timeout=SECONDS) for _ in range(health._MAX_WATCHERS + 1)]
    for watch in watches:
        watch.add_callback(ended.set)
    assert [next(watch).status for watch in watches] == [SERVING] * len(watches)
    assert ended.wait(SECONDS)
    (gone,) = (watch for watch in watches if not watch.is_active())
    assert gone.code() is grpc.StatusCode.UNAVAILABLE
    for watch in watches:
        watch.cancel()


def test_watch_without_a_message_is_refused(server: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = channel.stream_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(iter(()), timeout=SECONDS))
        assert caught.value.details() == "message: none was sent; Watch needs one"
        twice = watch(iter([b"", b""]), timeout=SECONDS)
        assert pb.HealthCheckResponse.FromString(next(twice)).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(twice)
        assert "more than one was sent" in caught.value.details()


@pytest.mark.parametrize(
    ("data", "compression", "named"),
    [
        (b"\xff", None, "the bytes are no message of Watch"),
        (b"\0" * 5000, None, "larger than max, which is 4096 bytes"),
        (b"\0" * 4000, grpc.Compression.Gzip, "compressed messages are not supported"),
    ],
)
def test_malformed_message_of_a_stream_is_refused(server: Running, data: bytes, compression: Any, named: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = channel.stream_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(iter([data]), timeout=SECONDS, compression=compression))
        assert named in caught.value.details()


def test_watch_ends_when_the_service_does(start: Launcher, bundle_path: Path) -> None:
    server = start(bundle_path)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        watch = HealthStub(channel).Watch(_request(""), timeout=SECONDS)
        assert next(watch).status == SERVING
        server.signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert next(watch, None) is None
        assert watch.code() is grpc.StatusCode.OK
    assert server.process.wait(SECONDS) == 0
