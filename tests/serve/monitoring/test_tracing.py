from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import SpanKind, StatusCode

from serve.monitoring import tracing
from serve.monitoring.tracing import Tracer, configure_tracing, exporter_names
from serve.request_context import RequestContext

if TYPE_CHECKING:
    from tests.serve.conftest import Launcher


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(memory: InMemorySpanExporter) -> Iterator[Tracer]:
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    with contextlib.closing(Tracer(provider)) as tracer:
        yield tracer


def _request(status: int | str = 200, **headers: str) -> RequestContext:
    """Return a request with times for all of its phases."""
    encoded = {name.encode(): value.encode() for name, value in headers.items()}
    request = RequestContext({b"x-request-id": b"id-1", **encoded}, "/v1/models/tiny:predict")
    request.protocol, request.status = "v1", status
    start = request.received_at = request.received_at - 1.0
    request.decode_started_at, request.decoded_at = start + 0.1, start + 0.2
    request.run_started_at, request.run_ended_at = start + 0.4, start + 0.9
    return request


def _spans(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in memory.get_finished_spans()}


def _milliseconds(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e6)


def test_a_request_has_a_span_and_one_for_each_of_its_phases(tracer: Tracer, memory: InMemorySpanExporter) -> None:
    tracer(_request())
    spans = _spans(memory)
    request = spans.pop("v1 unknown model")
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert {name: _milliseconds(span) for name, span in spans.items() if name != "write"} == {
        "read": 100,
        "wait": 200,
        "run": 500,
    }
    assert set(spans) == {"read", "wait", "run", "write"}
    assert {span.parent.span_id for span in spans.values() if span.parent} == {request.context.span_id}
    assert request.start_time == pytest.approx((time.time() - 1.0) * 1e9, abs=5e8)
    assert dict(request.attributes or {}) == {
        "url.path": "/v1/models/tiny:predict",
        "http.response.status_code": 200,
        "pipe.request_id": "id-1",
    }


def test_callers_trace_and_its_state_are_continued(tracer: Tracer, memory: InMemorySpanExporter) -> None:
    tracer(_request(traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=1"))
    for span in memory.get_finished_spans():
        assert f"{span.context.trace_id:032x}" == TRACE
        assert span.context.trace_state.get("a") == "1"
    request = _spans(memory)["v1 unknown model"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT


def test_unsampled_trace_is_not_recorded(tracer: Tracer, memory: InMemorySpanExporter) -> None:
    tracer(_request(traceparent=f"00-{TRACE}-{PARENT}-00"))
    assert memory.get_finished_spans() == ()


@pytest.mark.parametrize("parent", ["", "00-short-1-01", f"00-{'0' * 32}-{PARENT}-01", "é"])
def test_a_damaged_parent_begins_a_new_trace(tracer: Tracer, memory: InMemorySpanExporter, parent: str) -> None:
    tracer(_request(traceparent=parent))
    assert _spans(memory)["v1 unknown model"].parent is None


@pytest.mark.parametrize(
    ("code", "status"), [(500, StatusCode.ERROR), ("INTERNAL", StatusCode.ERROR), (400, StatusCode.UNSET)]
)
def test_only_server_errors_mark_the_span(
    tracer: Tracer, memory: InMemorySpanExporter, code: int | str, status: StatusCode
) -> None:
    tracer(_request(code))
    assert _spans(memory)["v1 unknown model"].status.status_code is status


def test_phase_in_which_a_request_failed_is_its_last() -> None:
    request = _request()
    request.run_started_at = request.run_ended_at = 0.0
    assert [name for name, _, _ in request.phases()] == ["read", "wait"]
    request.decode_started_at = request.decoded_at = 0.0
    assert request.phases() == []


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, []),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, []),
        ({"OTEL_TRACES_EXPORTER": "console"}, ["console"]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp_proto_http", "console"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, []),
    ],
)
def test_exporters_follow_the_standard_otel_variables(environment: dict[str, str], names: list[str]) -> None:
    assert exporter_names(environment) == names


def test_tracing_is_off_by_default() -> None:
    assert configure_tracing({}) is None


def _gone(name: str) -> None:
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("find", [lambda name: None, _gone])
def test_missing_tracing_package_is_reported(
    find: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "find_spec", find)
    assert configure_tracing({"OTEL_TRACES_EXPORTER": "otlp"}) is None
    assert "install pipe-road[tracing]" in caplog.text


def test_unknown_exporter_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    tracer = configure_tracing({"OTEL_TRACES_EXPORTER": "zipkin"})
    assert tracer is not None
    tracer.close()
    assert "traces cannot go to zipkin" in caplog.text


class Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP collector over HTTP."""

    spans: list[Any]

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in message.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the standard library's name
        """Not on stderr."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    found: list[Any] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Collector,), {"spans": found})) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", found
        server.shutdown()
        thread.join()


def test_a_service_sends_its_spans_before_it_ends(
    collector: tuple[str, list[Any]],
    start: Launcher,
    bundle_path: Path,
    picture: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, found = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    server = start(bundle_path)
    answer = httpx.post(
        f"{server.url}/v1/models/tiny:predict",
        json={"instances": [picture]},
        headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        timeout=60,
    )
    assert server.stop() == 0
    assert {name for name, _ in found} == {"pipe-serve"}
    spans = {span.name: span for _, span in found}
    assert set(spans) == {"v1 tiny", "read", "wait", "run", "write"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    request = spans["v1 tiny"]
    received = {one.key: one.value.string_value for one in request.attributes}
    assert received["pipe.request_id"] == answer.headers["x-request-id"]
    assert received["pipe.bundle"] == answer.headers["x-bundle-digest"]
    assert request.parent_span_id.hex() == PARENT
    assert all(request.start_time_unix_nano <= span.start_time_unix_nano for span in spans.values())
    assert all(span.end_time_unix_nano <= request.end_time_unix_nano for span in spans.values())


def test_unreachable_collector_does_not_affect_the_service(
    start: Launcher, bundle_path: Path, picture: list[Any], monkeypatch: pytest.MonkeyPatch, free_ports: Any
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    server = start(bundle_path)
    body = {"instances": [picture]}
    assert httpx.post(f"{server.url}/v1/models/tiny:predict", json=body, timeout=60).status_code == 200
    assert server.stop() == 0
