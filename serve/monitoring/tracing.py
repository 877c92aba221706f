"""OpenTelemetry spans of each prediction, made when it has ended; off, and free, unless OTEL_ variables turn them on.

OpenTelemetry's SDK reads the standard variables; this module only decides whether there are traces, and which exporter
gets them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from serve.monitoring.logs import log_fields
from serve.monitoring.request_log import TRACE_HEADERS, is_failure
from serve.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_SECONDS = 3.0  # for what is not exported yet when the service ends

log = logging.getLogger(__name__)


class Tracer:
    """Called with each prediction that has ended; it makes a span of it and one of each phase."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pipe-road")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, request: RequestContext) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset, now = time.time() - time.monotonic(), time.monotonic()
        headers, version = request.headers, request.model_version
        parent = {name.decode(): headers[name].decode("latin-1") for name in TRACE_HEADERS if name in headers}
        span = self._tracer.start_span(
            f"{request.protocol} {version.name if version else 'unknown model'}",
            self._propagator.extract(parent),
            SpanKind.SERVER,
            _attributes(request),
            start_time=_nanoseconds(offset + request.received_at),
        )
        if span.is_recording():
            context = set_span_in_context(span)
            for name, started_at, ended_at in request.phases():
                phase = self._tracer.start_span(name, context, start_time=_nanoseconds(offset + started_at))
                phase.end(_nanoseconds(offset + (ended_at or now)))
            if is_failure(request.status):
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(offset + now))

    def close(self) -> None:
        """Send the last spans, for a moment only: a collector that is gone must not keep the service from ending."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)
        if ending.is_alive():
            log.warning("the last traces could not be sent within %s s", _FLUSH_SECONDS)


def configure_tracing(environment: Mapping[str, str]) -> Tracer | None:
    """Return None if traces are off, or with a warning if OpenTelemetry is not installed."""
    names = exporter_names(environment)
    if not names:
        return None
    if not _installed():
        log.warning("OTEL_ variables turn traces on; to fix that OpenTelemetry is missing: install pipe-road[tracing]")
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(environment), shutdown_on_exit=False)
    for name in names:
        if (exporter := _exporter(name)) is not None:
            provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("tracing", extra=log_fields(exporters=",".join(names)))
    return Tracer(provider)


def _installed() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def exporter_names(environment: Mapping[str, str]) -> list[str]:
    """Return the exporters by the names that packages register; none if traces are off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not exporters and not any(environment.get(one) for one in _ENDPOINTS):
        return []
    protocol = next((environment[one] for one in _PROTOCOLS if environment.get(one)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol.strip() == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in (exporters or "otlp").split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _exporter(name: str) -> Any:
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        log.warning("traces cannot go to %s: no such exporter is installed; see OTEL_TRACES_EXPORTER", name)
        return None
    return next(iter(found)).load()()


def _resource(environment: Mapping[str, str]) -> Any:
    """Return the service name: that of the environment, or `pipe-serve`."""
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "pipe-serve"})


def _attributes(request: RequestContext) -> dict[str, str | int]:
    status, version = request.status, request.model_version
    attributes: dict[str, str | int] = {"url.path": request.path, "pipe.request_id": request.id.decode()}
    if isinstance(status, str):
        attributes["rpc.grpc.status"] = status
    else:
        attributes["http.response.status_code"] = int(status)
    if version is not None:
        attributes |= {"pipe.model": version.name, "pipe.version": version.version, "pipe.bundle": version.digest}
    return attributes


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
