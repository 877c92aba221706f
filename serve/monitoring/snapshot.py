"""What the service has counted, as plain data: for /metrics, the statistics and the page.

One process takes a snapshot of itself. Several workers send theirs to each other, and add them up.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from serve.model_version import ModelVersion
from serve.monitoring.metrics import ModelMetrics, Tokens, add
from serve.request_context import AnsweringVersion, in_flight
from serve.sampling import SampleCounts
from serve.shadow import Agreement

_SAME_IN_ALL = ("python_info", "process_start_time_seconds")  # metrics of a process that are not added up


@dataclass
class VersionSnapshot:
    """A loaded version of a model."""

    name: str
    version: str
    digest: str
    verdict: str
    provider: str
    is_current: bool
    fell_back: bool
    is_batching: bool
    waiting: int  # requests
    metrics: ModelMetrics
    canary: tuple[str, float] | None  # its version and its share of the requests
    shadow: Agreement | None
    shadow_digest: str
    tokens: Tokens | None

    @classmethod
    def of(cls, version: ModelVersion, *, is_current: bool) -> VersionSnapshot:
        session, canary, shadow = version.predictor.session, version.canary, version.shadow
        version.metrics.flush()
        return cls(
            version.name,
            version.version,
            version.digest,
            version.bundle.manifest.verdict,
            session.provider,
            is_current,
            bool(session.fallback),
            not version.predictor.unbatched_reason,
            version.batcher.waiting,
            version.metrics,
            None if canary is None else (canary.candidate.version, canary.share),
            None if shadow is None else shadow.agreement,
            "" if shadow is None else shadow.digest,
            None if version.generator is None else version.generator.tokens(),
        )


@dataclass
class Snapshot:
    """All counters of one process, or of several."""

    versions: dict[tuple[str, str], VersionSnapshot] = field(default_factory=dict)  # by name and version
    no_model: ModelMetrics = field(default_factory=ModelMetrics)  # requests that named no loaded model
    in_flight: int = 0
    samples: SampleCounts | None = None  # of traffic, if they are kept
    process: list[Metric] = field(default_factory=list)  # memory, time and files, as prometheus_client has them

    def merge(self, other: Snapshot) -> None:
        """Add the counters of another process, which has the same versions."""
        add(self.versions, other.versions)
        add(self.no_model, other.no_model)
        self.in_flight += other.in_flight
        add(self.samples, other.samples)
        added = {_key(sample): sample.value for metric in other.process for sample in metric.samples}
        for metric in self.process:
            if metric.name not in _SAME_IN_ALL:
                metric.samples = [one._replace(value=one.value + added.get(_key(one), 0.0)) for one in metric.samples]

    def end(self) -> None:
        """Keep what still counts of a process that has ended: what it did, and not what it had to do."""
        self.in_flight, self.process = 0, []
        for version in self.versions.values():
            version.waiting = 0
            if (tokens := version.tokens) is not None:
                tokens.running = tokens.waiting = tokens.cache_bytes = tokens.max_cache_bytes = tokens.prefix_bytes = 0


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Return the sum of these."""
    total = copy.deepcopy(snapshots[0]) if snapshots else Snapshot()
    for snapshot in snapshots[1:]:
        total.merge(copy.deepcopy(snapshot))  # a part of it may become a part of the total
    return total


class Metrics:
    """The counters of this process that belong to no model, and the snapshot of all."""

    def __init__(
        self, loaded_versions: Callable[[], Iterable[tuple[ModelVersion, bool]]], samples: SampleCounts | None = None
    ) -> None:
        """`loaded_versions` lists each loaded version and whether it is its model's current one."""
        self._loaded_versions, self._samples = loaded_versions, samples
        self.no_model = ModelMetrics()
        self._process = CollectorRegistry(auto_describe=False)
        for kind in (ProcessCollector, PlatformCollector, GCCollector):
            kind(registry=self._process)
        self.of_service: Callable[[], Awaitable[Snapshot]] = self._of_this_process

    def of_model(self, version: AnsweringVersion | None) -> ModelMetrics:
        return self.no_model if version is None else version.metrics

    def count_rejected(self, reason: str) -> None:
        """Count a request that was refused before its model was known."""
        self.no_model.rejected[reason] += 1

    def snapshot(self) -> Snapshot:
        """Return what this process has counted."""
        self.no_model.flush()
        versions = [VersionSnapshot.of(one, is_current=current) for one, current in self._loaded_versions()]
        return Snapshot(
            {(version.name, version.version): version for version in versions},
            self.no_model,
            in_flight.count,
            self._samples,
            list(self._process.collect()),
        )

    async def _of_this_process(self) -> Snapshot:
        return self.snapshot()


def _key(sample: Sample) -> tuple[object, ...]:
    return (sample.name, *sorted(sample.labels.items()))
