"""The metrics of the service in the formats of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from serve.monitoring.metrics import Histogram, ModelMetrics
from serve.monitoring.snapshot import Snapshot, VersionSnapshot
from serve.sampling import SampleCounts

_MODEL = ("model", "version")  # labels
Labelled = Sequence[tuple[tuple[str, str], ModelMetrics]]


def exposition(snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics in the format that the client accepts, and the content type."""
    encode, content_type = choose_encoder(accept)
    return encode(cast("Any", _Families(snapshot))), content_type


class _Families:
    """What an encoder of prometheus_client reads of a registry."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot, versions = self._snapshot, list(self._snapshot.versions.values())
        yield from snapshot.process
        yield GaugeMetricFamily("pipe_requests_in_flight", "Prediction requests not answered yet.", snapshot.in_flight)
        if snapshot.samples is not None:
            yield from _sample_families(snapshot.samples)
        yield from _version_families(versions)
        yield from _rollout_families(versions)
        models = [(key, version.metrics) for key, version in snapshot.versions.items()]
        with_unknown = [*models, (("", ""), snapshot.no_model)]
        yield _requests_family(with_unknown)
        yield _rejected_family(with_unknown)
        text = "From a request's head to the last byte of its answer handed to the network."
        yield _histograms_family("pipe_request_seconds", text, "protocol", with_unknown, "seconds")
        text = "Phases of requests that were answered: read, wait, run, write; run is that of the whole batch."
        yield _histograms_family("pipe_phase_seconds", text, "phase", models, "phases")
        yield from _batch_families(models)
        yield from _token_families(versions)


def _sample_families(counts: SampleCounts) -> Iterator[Metric]:
    samples = CounterMetricFamily("pipe_samples", "Requests to keep, by what became of them.", labels=("result",))
    for result in ("written", "sent", "dropped", "failed"):
        samples.add_metric((result,), getattr(counts, result))
    yield samples
    yield CounterMetricFamily("pipe_labels", "Labels stored.", counts.labels)
    text = "Files of samples deleted, as they took more room than allowed."
    yield CounterMetricFamily("pipe_sample_files_deleted", text, counts.files_deleted)


def _version_families(versions: Sequence[VersionSnapshot]) -> Iterator[Metric]:
    labels = (*_MODEL, "digest", "verdict", "provider")
    bundle = GaugeMetricFamily("pipe_bundle_info", "The bundle behind each version.", labels=labels)
    current = GaugeMetricFamily("pipe_version_current", "1 for the version that answers by default.", labels=_MODEL)
    text = "1 where the requested provider is unavailable."
    fell_back = GaugeMetricFamily("pipe_provider_fell_back", text, labels=_MODEL)
    batching = GaugeMetricFamily("pipe_batching", "1 where waiting requests are merged into batches.", labels=_MODEL)
    waiting = GaugeMetricFamily("pipe_queue_length", "Requests that wait to be computed.", labels=_MODEL)
    for version in versions:
        model = (version.name, version.version)
        bundle.add_metric((*model, version.digest, version.verdict, version.provider), 1)
        current.add_metric(model, version.is_current)
        fell_back.add_metric(model, version.fell_back)
        batching.add_metric(model, version.is_batching)
        waiting.add_metric(model, version.waiting)
    yield from (bundle, current, fell_back, batching, waiting)


def _rollout_families(versions: Sequence[VersionSnapshot]) -> Iterator[Metric]:
    """Metrics of new bundles beside the current version: a canary has requests of its own, a shadow gets copies."""
    canary = GaugeMetricFamily("pipe_canary_share", "Share of the requests that a new version gets.", labels=_MODEL)
    labels, text = ("model", "digest"), "Requests copied to a shadow, by its answer."
    shadow = CounterMetricFamily("pipe_shadow_requests", text, labels=(*labels, "result"))
    rows = CounterMetricFamily("pipe_shadow_rows", "Instances both have ranked.", labels=(*labels, "same_class"))
    difference = GaugeMetricFamily("pipe_shadow_max_difference", "Largest difference of a number.", labels=labels)
    for version in versions:
        if version.canary is not None:
            candidate, share = version.canary
            canary.add_metric((version.name, candidate), share)
        if version.shadow is not None:
            agreement, bundle = version.shadow, (version.name, version.shadow_digest)
            for result in ("same", "other", "failed", "dropped"):
                shadow.add_metric((*bundle, result), getattr(agreement, result))
            rows.add_metric((*bundle, "true"), agreement.rows_same_class)
            rows.add_metric((*bundle, "false"), agreement.rows - agreement.rows_same_class)
            difference.add_metric(bundle, agreement.max_difference)
    yield from (canary, shadow, rows, difference)


def _requests_family(models: Labelled) -> Metric:
    labels = (*_MODEL, "protocol", "code")
    family = CounterMetricFamily("pipe_requests", "Prediction requests, by how they ended.", labels=labels)
    for model, metrics in models:
        for (protocol, status), count in metrics.requests.items():
            family.add_metric((*model, protocol, status if isinstance(status, str) else str(int(status))), count)
    return family


def _rejected_family(models: Labelled) -> Metric:
    family = CounterMetricFamily("pipe_rejected", "Requests refused, by reason.", labels=(*_MODEL, "reason"))
    for model, metrics in models:
        for reason, count in metrics.rejected.items():
            family.add_metric((*model, reason), count)
    return family


def _histograms_family(name: str, text: str, label: str, models: Labelled, attribute: str) -> Metric:
    family = HistogramMetricFamily(name, text, labels=(*_MODEL, label))
    for model, metrics in models:
        for value, histogram in getattr(metrics, attribute).items():
            _add_histogram(family, (*model, value), histogram)
    return family


def _batch_families(models: Labelled) -> Iterator[Metric]:
    for name, text, attribute in (
        ("pipe_batch_rows", "Instances that ran together.", "batch_rows"),
        ("pipe_batch_requests", "Requests that ran together.", "batch_requests"),
        ("pipe_batch_seconds", "What one run of the model took, by itself.", "batch_seconds"),
    ):
        family = HistogramMetricFamily(name, text, labels=_MODEL)
        for model, metrics in models:
            _add_histogram(family, model, getattr(metrics, attribute))
        yield family


def _token_families(versions: Iterable[VersionSnapshot]) -> Iterator[Metric]:
    """The metrics of language models; nothing where there are none."""
    models = [((one.name, one.version), one.tokens) for one in versions if one.tokens is not None]
    if not models:
        return
    tokens = CounterMetricFamily("pipe_tokens", "Tokens read and written.", labels=(*_MODEL, "direction"))
    texts = GaugeMetricFamily("pipe_sequences", "Texts being written, or waiting to be.", labels=(*_MODEL, "state"))
    text = "Memory for keys and values: used by texts, and the limit."
    memory = GaugeMetricFamily("pipe_cache_bytes", text, labels=(*_MODEL, "kind"))
    text = "From a request's head to a text's first token."
    first = HistogramMetricFamily("pipe_first_token_seconds", text, labels=_MODEL)
    between = HistogramMetricFamily("pipe_between_tokens_seconds", "From a text's token to its next.", labels=_MODEL)
    preemptions = CounterMetricFamily("pipe_preemptions", "Texts that had to give their memory back.", labels=_MODEL)
    queries = CounterMetricFamily("pipe_prefix_cache_queries", "Tokens of prompts that were searched.", labels=_MODEL)
    hits = CounterMetricFamily("pipe_prefix_cache_hits", "Tokens of prompts that were found.", labels=_MODEL)
    prefixes = GaugeMetricFamily("pipe_prefix_cache_bytes", "Memory of the beginnings of earlier texts.", labels=_MODEL)
    for model, counted in models:
        metrics = counted.metrics
        preemptions.add_metric(model, metrics.preemptions)
        queries.add_metric(model, metrics.prefix_queries)
        hits.add_metric(model, metrics.prefix_hits)
        prefixes.add_metric(model, counted.prefix_bytes)
        tokens.add_metric((*model, "in"), metrics.tokens_in)
        tokens.add_metric((*model, "out"), metrics.tokens_out)
        texts.add_metric((*model, "running"), counted.running)
        texts.add_metric((*model, "waiting"), counted.waiting)
        memory.add_metric((*model, "used"), counted.cache_bytes)
        memory.add_metric((*model, "limit"), counted.max_cache_bytes)
        _add_histogram(first, model, metrics.first_seconds)
        _add_histogram(between, model, metrics.between_seconds)
    yield from (tokens, texts, memory, preemptions, queries, hits, prefixes, first, between)


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    family.add_metric(labels, buckets=histogram.buckets(), sum_value=histogram.total)
