"""OpenTelemetry spans of each prediction, made when it has ended: off, and free, unless the environment asks for them.

What the standard OTEL_ variables say is read by OpenTelemetry's own SDK; here is only whether they ask for traces,
and to whom these go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from serve.logs import failed, told
from serve.request_context import Watch

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_SECONDS = 3.0  # for what is not exported yet when the service ends

log = logging.getLogger(__name__)


class Tracer:
    """Called with each prediction that has ended."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("pipe-road")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, watch: Watch) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset, now = time.time() - time.monotonic(), time.monotonic()
        span = self._tracer.start_span(
            f"{watch.protocol} {watch.model or 'unknown model'}",
            self._parent(watch),
            SpanKind.SERVER,
            _attributes(watch),
            start_time=_nanoseconds(offset + watch.began),
        )
        if span.is_recording():
            self._phases(watch, set_span_in_context(span), offset, now)
            if failed(watch.code):
                span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(offset + now))

    def close(self) -> None:
        """Send what is left, for a moment: a collector that is gone keeps no service from ending."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)
        if ending.is_alive():
            log.warning("the last traces could not be sent within %s s", _FLUSH_SECONDS)

    def _parent(self, watch: Watch) -> Context:
        return self._propagator.extract({name: value.decode("latin-1") for name, value in watch.trace.items()})

    def _phases(self, watch: Watch, parent: Context, offset: float, now: float) -> None:
        for name, began, ended in phases(watch, now):
            span: Span = self._tracer.start_span(name, parent, start_time=_nanoseconds(offset + began))
            span.end(_nanoseconds(offset + ended))


def phases(watch: Watch, now: float) -> Iterator[tuple[str, float, float]]:
    """Those that were begun; the one that was under way when the request failed ends with it."""
    times = (watch.reading, watch.read, watch.taken, watch.ran)
    for place, name in enumerate(("read", "wait", "run", "write")):
        if not times[place]:
            return
        yield name, times[place], (times[place + 1] if place < 3 else 0.0) or now


def configured(environment: Mapping[str, str]) -> Tracer | None:
    """None where nobody asks for traces; with a warning where somebody does and they cannot be had."""
    names = exporters(environment)
    if not names:
        return None
    if not _installed():
        log.warning("OTEL_ variables ask for traces, but OpenTelemetry is not here: install pipe-road[tracing]")
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(environment), shutdown_on_exit=False)
    for name in names:
        if (exporter := _exporter(name)) is not None:
            provider.add_span_processor(BatchSpanProcessor(exporter))
    log.info("tracing", extra=told(exporters=",".join(names)))
    return Tracer(provider)


def _installed() -> bool:
    try:
        return find_spec("opentelemetry.sdk") is not None
    except ModuleNotFoundError:  # nor is what it would be a part of
        return False


def exporters(environment: Mapping[str, str]) -> list[str]:
    """Their names, as packages register them; none where traces are off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    asked = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if not asked and not any(environment.get(one) for one in _ENDPOINTS):
        return []
    protocol = next((environment[one] for one in _PROTOCOLS if environment.get(one)), "http/protobuf")
    otlp = "otlp_proto_grpc" if protocol.strip() == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in (asked or "otlp").split(",")]
    return [otlp if name == "otlp" else name for name in names if name not in ("", "none")]


def _exporter(name: str) -> Any:
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        log.warning("traces cannot go to %s: no such exporter is installed; see OTEL_TRACES_EXPORTER", name)
        return None
    return next(iter(found)).load()()


def _resource(environment: Mapping[str, str]) -> Any:
    """Named by the environment; `pipe-serve` where it says nothing."""
    from opentelemetry.sdk.resources import Resource

    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if named else {"service.name": "pipe-serve"})


def _attributes(watch: Watch) -> dict[str, str | int]:
    status = "rpc.grpc.status" if isinstance(watch.code, str) else "http.response.status_code"
    found: dict[str, str | int] = {
        "url.path": watch.path,
        status: watch.code if isinstance(watch.code, str) else int(watch.code),
        "pipe.request_id": watch.id.decode(),
    }
    if watch.served is not None:
        found |= {
            "pipe.model": watch.served.name,
            "pipe.version": watch.served.version,
            "pipe.bundle": watch.served.bundle.digest,
        }
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
