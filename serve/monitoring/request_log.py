"""What is recorded of every request: metrics, a log line for failures and a sample of the rest, and a trace."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from serve.errors import RequestError, as_request_error
from serve.monitoring.logs import LogLimit, faults, log_fields
from serve.monitoring.snapshot import Metrics
from serve.request_context import RequestContext, in_flight
from serve.runtime.predictor import CodecError

TRACE_HEADERS = (b"traceparent", b"tracestate")
_LONGEST_PATH = 200
_FAILURE_CODES = ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "UNKNOWN")  # of gRPC

log = logging.getLogger(__name__)
_access_log = logging.getLogger("serve.access")


@dataclass(slots=True)
class RequestLog:
    """`share` is the part of the successful requests that get a log line; failures always do, up to a rate."""

    metrics: Metrics
    share: float = 0.0
    trace: Callable[[RequestContext], None] | None = None
    _failures: LogLimit = field(default_factory=partial(LogLimit, "more requests failed than are logged"))
    _codec_errors: LogLimit = field(default_factory=partial(LogLimit, "the codec failed more often than is logged"))

    def fail(self, request: RequestContext, error: Exception) -> RequestError | None:
        """Count and return the refusal; a fault of ours is logged with its traceback and returns None."""
        version = request.model_version
        refusal = as_request_error(error)
        if refusal is None:
            if faults.allows():
                log.error("request failed", exc_info=error, extra=_identity(request))
            return None
        self.metrics.of_model(version).rejected[refusal.reason] += 1
        if isinstance(error, CodecError) and self._codec_errors.allows():
            log.warning("the codec cannot decode a request", exc_info=error.__cause__, extra=_identity(request))
        return refusal

    def finish(self, request: RequestContext) -> None:
        """Record a request that has been answered or given up; it is no longer in flight."""
        now = request.ended_at = time.monotonic()
        if request.protocol:
            in_flight.count -= 1
            times = request.phase_times if request.encoded_at else ()
            metrics = self.metrics.of_model(request.model_version)
            metrics.record_request(request.protocol, request.status, now - request.received_at, times)
            if self.trace is not None:
                self.trace(request)
        if is_failure(request.status):
            if self._failures.allows():
                _log_request(request, logging.WARNING)
        elif self.share and random.random() < self.share:
            _log_request(request, logging.INFO)


def is_failure(status: int | str) -> bool:
    """Return True for faults of ours and for a lack of capacity or time; gRPC has names for its codes."""
    return status in _FAILURE_CODES if isinstance(status, str) else status >= 500


def _identity(request: RequestContext) -> dict[str, Any]:
    """Return the fields that name a request and its model in a line about its failure."""
    version = request.model_version
    return log_fields(request_id=request.id.decode(), path=request.path, model=version.name if version else "")


def _log_request(request: RequestContext, level: int) -> None:
    version = request.model_version
    fields = log_fields(
        request_id=request.id.decode(),
        path=request.path[:_LONGEST_PATH],
        protocol=request.protocol,
        model=version.name if version else "",
        version=version.version if version else "",
        code=request.status if isinstance(request.status, str) else int(request.status),
        milliseconds=round((request.ended_at - request.received_at) * 1e3, 3),
    )
    _access_log.log(level, "request", extra=fields)
