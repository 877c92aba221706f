"""Statistics of a model version, as Triton's statistics extension has them, from the version's metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from serve.model_version import ModelVersion
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
    phases = {name: metrics.phases[phase] for name, phase in _PHASES.items()}
    batches = [(rows, _duration(*metrics.batch_sizes[rows])) for rows in sorted(metrics.batch_sizes.copy())]
    zero = _duration(0, 0.0)
    return {
        "name": version.name,
        "version": version.version,
        "last_inference": int(metrics.last_request_at * 1000),
        "inference_count": int(metrics.batch_rows.total),
        "execution_count": metrics.batch_rows.count,
        "inference_stats": {
            "success": _duration(requests - metrics.failed, seconds - metrics.failed_seconds),
            "fail": _duration(metrics.failed, metrics.failed_seconds),
            **{name: _duration(phase.count, phase.total) for name, phase in phases.items()},
            "cache_hit": zero,
            "cache_miss": zero,
        },
        "batch_stats": [
            {"batch_size": rows, "compute_input": zero, "compute_infer": run, "compute_output": zero}
            for rows, run in batches
        ],
    }


def _duration(count: float, seconds: float) -> dict[str, int]:
    return {"count": int(count), "ns": max(0, round(seconds * 1e9))}
