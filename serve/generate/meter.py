"""What Prometheus sees of a language model: tokens, how long the first takes and those after it, memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from serve.histogram import SECONDS, Histogram

if TYPE_CHECKING:
    from serve.served import Served

_LONG_SECONDS = (*SECONDS, 30.0, 60.0)  # a long prompt waits, and is read
_MODEL = ("model", "version")


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


def families(served: Iterable[Served]) -> Iterator[Metric]:
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
