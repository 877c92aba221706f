"""What Prometheus sees of the service: plain counters kept by each version of a model, written out when asked for.

A histogram as Prometheus has it, kept in plain counts until somebody asks.

What Prometheus sees of a language model: tokens, how long the first takes and those after it, memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from serve.request_context import Watch

if TYPE_CHECKING:
    from serve.model_version import ModelVersion


SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """Counts of values up to each bound, and beyond the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, values: Sequence[float]) -> None:
        """Many at once, each of which then costs next to nothing."""
        found = np.bincount(np.searchsorted(self.bounds, values), minlength=len(self.counts))
        self.counts = [count + int(more) for count, more in zip(self.counts, found, strict=True)]
        self.total += sum(values)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        found, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            found.append(("+Inf" if bound == float("inf") else str(float(bound)), float(seen)))
        return found


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PHASES = ("read", "wait", "run", "write")
_MANY = 256


class Series:
    """What is counted of one version of one model. It lives and ends with that version, and so do its series."""

    def __init__(self) -> None:
        self.requests: defaultdict[tuple[str, int | str], int] = defaultdict(int)
        self.rejected: defaultdict[str, int] = defaultdict(int)
        self.seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.read, self.wait, self.run, self.write = (Histogram(SECONDS) for _ in PHASES)
        self.batch_rows, self.batch_requests = Histogram(SIZES), Histogram(SIZES)
        self.batch_seconds = Histogram(SECONDS)
        self._lock = threading.Lock()
        self._fresh: list[Watch] = []  # ended, and not counted yet

    def batch(self, requests: int, rows: int, seconds: float) -> None:
        """From whatever thread ran it."""
        with self._lock:
            self.batch_requests.observe(requests)
            self.batch_rows.observe(rows)
            self.batch_seconds.observe(seconds)

    def ended(self, watch: Watch) -> None:
        """On the event loop. Counted when many have come together, or when somebody looks."""
        self._fresh.append(watch)
        if len(self._fresh) >= _MANY:
            self.count()

    def count(self) -> None:
        """Bring all up to date; who reads them calls it first."""
        fresh, self._fresh = self._fresh, []
        for watch in fresh:
            self.requests[watch.protocol, watch.code] += 1
        for protocol in {watch.protocol for watch in fresh}:
            self.seconds[protocol].add([one.over - one.began for one in fresh if one.protocol == protocol])
        if answered := [watch for watch in fresh if watch.written]:
            self.read.add([watch.read - watch.reading for watch in answered])
            self.wait.add([watch.taken - watch.read for watch in answered])
            self.run.add([watch.ran - watch.taken for watch in answered])
            self.write.add([watch.written - watch.ran for watch in answered])


class Metrics(Collector):
    """All of the service's; which versions there are is asked anew each time."""

    def __init__(self, served: Callable[[], Iterable[tuple[ModelVersion, bool]]]) -> None:
        """`served` lists each version that is loaded, and whether it is its model's current one."""
        self._served = served
        self.in_flight = 0
        self.unknown = Series()  # what was asked of no model there is
        self._registry = CollectorRegistry(auto_describe=False)
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._registry)
        self._registry.register(self)

    def series(self, watch: Watch) -> Series:
        return self.unknown if watch.served is None else watch.served.series

    def refused(self, reason: str) -> None:
        """A request that no model is known of."""
        self.unknown.rejected[reason] += 1

    def text(self, accept: str) -> tuple[bytes, str]:
        """In the format that is asked for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        served = list(self._served())
        labelled = [((one.name, one.version), one.series) for one, _ in served]
        yield GaugeMetricFamily("pipe_requests_in_flight", "Prediction requests not answered yet.", self.in_flight)
        yield from _versions(served)
        yield from _shares(served)
        everything = [*labelled, (("", ""), self.unknown)]
        for _, series in everything:
            series.count()
        yield _requests(everything)
        yield _rejected(everything)
        yield _seconds(everything)
        yield _phases(labelled)
        yield from _batches(labelled)
        yield from families(one for one, _ in served)


Labelled = Sequence[tuple[tuple[str, str], Series]]
_MODEL = ("model", "version")


def _versions(served: Sequence[tuple[ModelVersion, bool]]) -> Iterator[Metric]:
    bundle = GaugeMetricFamily(
        "pipe_bundle_info", "The bundle behind each version.", labels=(*_MODEL, "digest", "verdict", "provider")
    )
    current = GaugeMetricFamily("pipe_version_current", "1 for the version that answers by default.", labels=_MODEL)
    fell_back = GaugeMetricFamily(
        "pipe_provider_fell_back", "1 where the provider that was wished for could not be used.", labels=_MODEL
    )
    batching = GaugeMetricFamily("pipe_batching", "1 where waiting requests are merged into batches.", labels=_MODEL)
    waiting = GaugeMetricFamily("pipe_queue_length", "Requests that wait to be computed.", labels=_MODEL)
    for one, is_current in served:
        model, session = (one.name, one.version), one.predictor.session
        bundle.add_metric((*model, one.bundle.digest, one.bundle.manifest.verdict, session.provider), 1)
        current.add_metric(model, is_current)
        fell_back.add_metric(model, bool(session.fallback))
        batching.add_metric(model, not one.predictor.why_alone)
        waiting.add_metric(model, one.batcher.waiting)
    yield from (bundle, current, fell_back, batching, waiting)


def _shares(served: Sequence[tuple[ModelVersion, bool]]) -> Iterator[Metric]:
    """What a new bundle gets beside the current version: requests of its own, or copies."""
    canary = GaugeMetricFamily("pipe_canary_share", "Share of the requests that a new version gets.", labels=_MODEL)
    labels = ("model", "digest")
    shadow = CounterMetricFamily(
        "pipe_shadow_requests", "Requests copied to a shadow, by its answer.", labels=(*labels, "result")
    )
    rows = CounterMetricFamily("pipe_shadow_rows", "Instances both have ranked.", labels=(*labels, "same_class"))
    apart = GaugeMetricFamily("pipe_shadow_max_difference", "Largest difference of a number.", labels=labels)
    for one, _ in served:
        if one.canary is not None:
            canary.add_metric((one.name, one.canary.candidate.version), one.canary.share)
        if one.mirror is not None:
            told, bundle = one.mirror.agreement, (one.name, one.mirror.digest)
            for result in ("same", "other", "failed", "dropped"):
                shadow.add_metric((*bundle, result), getattr(told, result))
            rows.add_metric((*bundle, "true"), told.rows_same_class)
            rows.add_metric((*bundle, "false"), told.rows - told.rows_same_class)
            apart.add_metric(bundle, told.max_difference)
    yield from (canary, shadow, rows, apart)


def _requests(labelled: Labelled) -> Metric:
    family = CounterMetricFamily(
        "pipe_requests", "Prediction requests, by how they ended.", labels=(*_MODEL, "protocol", "code")
    )
    for model, series in labelled:
        for (protocol, code), count in series.requests.items():
            family.add_metric((*model, protocol, code if isinstance(code, str) else str(int(code))), count)
    return family


def _rejected(labelled: Labelled) -> Metric:
    family = CounterMetricFamily("pipe_rejected", "Requests refused, by reason.", labels=(*_MODEL, "reason"))
    for model, series in labelled:
        for reason, count in series.rejected.items():
            family.add_metric((*model, reason), count)
    return family


def _seconds(labelled: Labelled) -> Metric:
    family = HistogramMetricFamily(
        "pipe_request_seconds",
        "From a request's head to the last byte of its answer handed to the network.",
        labels=(*_MODEL, "protocol"),
    )
    for model, series in labelled:
        for protocol, histogram in series.seconds.items():
            _add(family, (*model, protocol), histogram)
    return family


def _phases(labelled: Labelled) -> Metric:
    family = HistogramMetricFamily(
        "pipe_phase_seconds",
        "Phases of requests that were answered: read, wait, run, write; run is that of the whole batch.",
        labels=(*_MODEL, "phase"),
    )
    for model, series in labelled:
        for phase in PHASES:
            _add(family, (*model, phase), getattr(series, phase))
    return family


def _batches(labelled: Labelled) -> Iterator[Metric]:
    for name, text, field in (
        ("pipe_batch_rows", "Instances that ran together.", "batch_rows"),
        ("pipe_batch_requests", "Requests that ran together.", "batch_requests"),
        ("pipe_batch_seconds", "What one run of the model took, by itself.", "batch_seconds"),
    ):
        family = HistogramMetricFamily(name, text, labels=_MODEL)
        for model, series in labelled:
            _add(family, model, getattr(series, field))
        yield family


def _add(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.total)


_LONG_SECONDS = (*SECONDS, 30.0, 60.0)  # a long prompt waits, and is read


class Meter:
    """Counted on the event loop."""

    def __init__(self) -> None:
        self.tokens_in = self.tokens_out = 0
        self.first_seconds, self.between_seconds = Histogram(_LONG_SECONDS), Histogram(SECONDS)

    def token(self, now: float, began: float, before: float) -> None:
        """One more, for a request of that beginning; `before`: when the one before it came, 0 for the first."""
        self.tokens_out += 1
        if before:
            self.between_seconds.observe(now - before)
        else:
            self.first_seconds.observe(now - began)


def families(served: Iterable[ModelVersion]) -> Iterator[Metric]:
    """Of those that are language models; nothing where there are none."""
    engines = [((one.name, one.version), one.writer.engine) for one in served if one.writer is not None]
    if not engines:
        return
    tokens = CounterMetricFamily("pipe_tokens", "Tokens read and written.", labels=(*_MODEL, "direction"))
    texts = GaugeMetricFamily("pipe_sequences", "Texts being written, or waiting to be.", labels=(*_MODEL, "state"))
    memory = GaugeMetricFamily(
        "pipe_cache_bytes", "Memory for keys and values: spoken for, and the most there is.", labels=(*_MODEL, "kind")
    )
    first = HistogramMetricFamily(
        "pipe_first_token_seconds", "From a request's head to a text's first token.", labels=_MODEL
    )
    between = HistogramMetricFamily("pipe_between_tokens_seconds", "From a text's token to its next.", labels=_MODEL)
    for model, engine in engines:
        meter = engine.meter
        tokens.add_metric((*model, "in"), meter.tokens_in)
        tokens.add_metric((*model, "out"), meter.tokens_out)
        texts.add_metric((*model, "running"), engine.running)
        texts.add_metric((*model, "waiting"), engine.waiting)
        memory.add_metric((*model, "used"), engine.cache_bytes)
        memory.add_metric((*model, "limit"), engine.rules.cache_bytes)
        first.add_metric(model, meter.first_seconds.buckets(), meter.first_seconds.total)
        between.add_metric(model, meter.between_seconds.buckets(), meter.between_seconds.total)
    yield from (tokens, texts, memory, first, between)
