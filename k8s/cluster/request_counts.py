"""The requests that pods have answered, read from their `/metrics`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_METRIC_LINE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Server errors of gRPC; those of HTTP begin with a 5. Errors of clients do not count against a version.
_SERVER_ERROR_CODES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS")


@dataclass(frozen=True)
class RequestCounts:
    """Requests of one version, or of one of its pods, over some time."""

    requests: float = 0.0
    failed: float = 0.0
    answered_within: Mapping[float, float] = field(default_factory=dict)  # histogram: seconds → requests

    @property
    def timed(self) -> float:
        return self.answered_within.get(math.inf, 0.0)

    def seconds_of(self, fraction: float) -> float:
        """Return the smallest bound of the histogram within which this fraction of the requests was answered."""
        bounds = (bound for bound, count in sorted(self.answered_within.items()) if count >= fraction * self.timed)
        return next(bounds, math.inf)

    def __add__(self, other: RequestCounts) -> RequestCounts:
        bounds = self.answered_within.keys() | other.answered_within.keys()
        answered_within = {
            bound: self.answered_within.get(bound, 0.0) + other.answered_within.get(bound, 0.0) for bound in bounds
        }
        return RequestCounts(self.requests + other.requests, self.failed + other.failed, answered_within)

    def since(self, earlier: RequestCounts) -> RequestCounts:
        """Return the difference to an earlier reading; a counter that went down was reset by a restart."""
        if self.requests < earlier.requests or self.failed < earlier.failed or self.timed < earlier.timed:
            return self
        answered_within = {
            bound: count - earlier.answered_within.get(bound, 0.0) for bound, count in self.answered_within.items()
        }
        return RequestCounts(self.requests - earlier.requests, self.failed - earlier.failed, answered_within)


def parse_request_counts(text: str, model: str) -> RequestCounts:
    """Read the counters of one model, over all protocols, from a pod's `/metrics`."""
    requests = failed = 0.0
    answered_within: dict[float, float] = {}
    for name, labels, value in _parse_metric_lines(text.splitlines()):
        if labels.get("model") != model:
            continue
        if name == "pipe_requests_total":
            requests += value
            failed += value if labels["code"].startswith("5") or labels["code"] in _SERVER_ERROR_CODES else 0.0
        elif name == "pipe_request_seconds_bucket":
            bound = float(labels["le"])
            answered_within[bound] = answered_within.get(bound, 0.0) + value
    return RequestCounts(requests, failed, answered_within)


def _parse_metric_lines(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in lines:
        if match := _METRIC_LINE.match(line):
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])
