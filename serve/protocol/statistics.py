"""Statistics of a model version, as Triton's statistics extension has them, from the version's metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from serve.model_version import ModelVersion
from serve.monitoring.metrics import Histogram
from serve.monitoring.snapshot import Snapshot, VersionSnapshot

# Triton's name of each phase of a request; what decodes and encodes is the codec and the protocol.
_PHASES = {"queue": "wait", "compute_input": "read", "compute_infer": "run", "compute_output": "write"}


def statistics(snapshot: Snapshot, versions: Iterable[ModelVersion]) -> list[dict[str, Any]]:
    """Return those of these versions."""
    found = (snapshot.versions.get((version.name, version.version)) for version in versions)
    return [version_statistics(version) for version in found if version is not None]


def version_statistics(version: VersionSnapshot) -> dict[str, Any]:
    """Return the counts since the version was loaded; durations are in nanoseconds.

    As in Triton, each request of a batch counts the whole run, and `inference_count` counts rows. There is no response
    cache. The phases of a batch as a whole are not measured except its run.
    """
    metrics = version.metrics
    requests, seconds = sum(metrics.requests.values()), sum(one.total for one in metrics.seconds.values())
    phases = {name: _histogram(metrics.phases[phase]) for name, phase in _PHASES.items()}
    return {
        "name": version.name,
        "version": version.version,
        "last_inference": int(metrics.last_request_at * 1000),
        "inference_count": int(metrics.batch_rows.total),
        "execution_count": metrics.batch_rows.count,
        "inference_stats": {
            "success": _duration(requests - metrics.failed, seconds - metrics.failed_seconds),
            "fail": _duration(metrics.failed, metrics.failed_seconds),
            **phases,
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": _duration(0, 0.0),
                "compute_infer": _duration(*metrics.batch_sizes[rows]),
                "compute_output": _duration(0, 0.0),
            }
            for rows in sorted(metrics.batch_sizes.copy())
        ],
    }


def _histogram(histogram: Histogram) -> dict[str, int]:
    return _duration(histogram.count, histogram.total)


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": max(0, round(seconds * 1e9))}
