"""Every request passes here twice, at its beginning and its end: metrics, access lines and traces come of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serve.errors import Refusal, refusal_of
from serve.logs import AccessLog, Ration, told
from serve.metrics import Metrics
from serve.request_context import Watch, request_id
from serve.runtime.predictor import Stumble

Record = Callable[[Watch], None]

READ = (b"x-request-id", b"traceparent", b"tracestate")  # of a request's headers
log = logging.getLogger(__name__)
_TRACED = ("traceparent", "tracestate")


@dataclass(slots=True)
class Observer:
    metrics: Metrics
    access: AccessLog
    trace: Record | None = None  # where tracing is on
    stumbles: Ration = field(default_factory=Ration)

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

    def failed(self, watch: Watch, error: Exception) -> Refusal | None:
        """The refusal, counted; None where the fault is ours, told in full where only we read it."""
        fields = told(request_id=watch.id.decode(), path=watch.path, model=watch.model)
        refusal = refusal_of(error)
        if refusal is None:
            log.error("request failed", exc_info=error, extra=fields)
            return None
        self.metrics.series(watch).rejected[refusal.reason] += 1
        if isinstance(error, Stumble) and self.stumbles.allows():
            log.warning("the codec cannot decode a request", exc_info=error.__cause__, extra=fields)
        return refusal

    def ended(self, watch: Watch) -> None:
        watch.over = time.monotonic()
        if watch.protocol:
            self.metrics.in_flight -= 1
            self.metrics.series(watch).ended(watch)
            if self.trace is not None:
                self.trace(watch)
        self.access.ended(watch)
