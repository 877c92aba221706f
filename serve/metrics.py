"""What Prometheus sees of the service, beside kserve's own histograms of each stage of a prediction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from kserve.metrics import POST_HIST_TIME, PRE_HIST_TIME, PREDICT_HIST_TIME, get_labels
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, Info

_STAGES = {"preprocess": PRE_HIST_TIME, "predict": PREDICT_HIST_TIME, "postprocess": POST_HIST_TIME}
_BUCKETS_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


@dataclass
class Outcome:
    """How a request ended; who answers it sets the code."""

    code: str = "aborted"  # the client left before an answer began


class Metrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._requests = Counter(
            "pipe_requests",
            "Prediction requests, by protocol and status code.",
            ["protocol", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "pipe_request_seconds",
            "Time from the request's first byte read to the answer's last byte written.",
            ["protocol"],
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )
        self._in_flight = Gauge("pipe_requests_in_flight", "Prediction requests not answered yet.", registry=registry)
        self._bundle = Info("pipe_bundle", "The bundle that is served.", registry=registry)

    def serving(self, *, name: str, digest: str, provider: str) -> None:
        self._bundle.info({"name": name, "digest": digest, "provider": provider})

    @contextmanager
    def request(self, protocol: str) -> Iterator[Outcome]:
        outcome, start = Outcome(), time.perf_counter()
        with self._in_flight.track_inprogress():
            try:
                yield outcome
            finally:
                self._requests.labels(protocol, outcome.code).inc()
                self._seconds.labels(protocol).observe(time.perf_counter() - start)


def stage_timer(model: str, stage: str) -> AbstractContextManager[Any]:
    """Times one stage in the histogram kserve has for it."""
    timer: AbstractContextManager[Any] = _STAGES[stage].labels(**get_labels(model)).time()
    return timer
