"""Every request passes here twice, at its beginning and its end: metrics, access lines and traces come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serve.logs import AccessLog
from serve.metrics import Metrics
from serve.watch import Watch, request_id

Record = Callable[[Watch], None]

READ = (b"x-request-id", b"traceparent", b"tracestate")  # of a request's headers
_TRACED = ("traceparent", "tracestate")


@dataclass(slots=True)
class Observer:
    metrics: Metrics
    access: AccessLog
    trace: Record | None = None  # where tracing is on

    def begin(self, headers: Mapping[bytes, bytes], path: str) -> Watch:
        """`headers`: those of a request, or what a gRPC call carries beside its message."""
        watch = Watch(request_id(headers.get(b"x-request-id")), path)
        if self.trace is not None:
            watch.trace = {name: headers[name.encode()] for name in _TRACED if name.encode() in headers}
        return watch

    def asked(self, watch: Watch, protocol: str) -> None:
        """It is a prediction: it counts until it has ended."""
        watch.protocol = protocol
        self.metrics.in_flight += 1

    def refused(self, watch: Watch, reason: str) -> None:
        self.metrics.series(watch).rejected[reason] += 1

    def ended(self, watch: Watch) -> None:
        if watch.protocol:
            self.metrics.in_flight -= 1
            self.metrics.series(watch).ended(watch)
            if self.trace is not None:
                self.trace(watch)
        self.access.ended(watch)
