"""Every request passes here twice, at its beginning and its end: metrics, access lines and traces come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from serve.logs import AccessLog
from serve.metrics import Metrics
from serve.watch import Watch, request_id

Record = Callable[[Watch], None]


@dataclass(slots=True)
class Observer:
    metrics: Metrics
    access: AccessLog
    trace: Record | None = None  # where tracing is on

    def begin(self, given_id: bytes | None, path: str, trace: bytes = b"") -> Watch:
        return Watch(request_id(given_id), path, trace=trace)

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
