"""The comparison of a canary with the stable version, by the requests that their pods count in `/metrics`.

The decision (`compare_versions`) is a pure function.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, TypeAlias

from pipeline.contract.settings.cluster import Rollout

OBSERVATION_ATTEMPTS = 5  # at a percentage whose measurements are not conclusive yet
_SECOND_STEP_PERCENT = 50.0  # after the first percentage and before all requests
_CONFIDENCE = 0.95  # of the intervals that are compared
_SLOW_MARGIN = 0.05  # how much larger the canary's fraction of slow requests may be
_FAST_FRACTION = 0.95  # of the stable version's requests; slower than these counts as slow
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


Readings: TypeAlias = Mapping[str, RequestCounts]  # of pods
Outcome = Literal["promote", "inconclusive", "roll back"]


Comparison: TypeAlias = tuple[Outcome, str]


@dataclass(frozen=True)
class CanaryResult:
    outcome: Outcome
    text: str  # the reasons


@dataclass(frozen=True)
class VersionMetric:
    """A metric of one version, with the interval of its confidence sequence."""

    labels: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class LabelMetric:
    """The task's metric on the labels of requests to both versions, a share of them."""

    name: str
    lower: bool  # lower is better
    margin: float  # how much worse the canary may be
    stable: VersionMetric
    canary: VersionMetric


ReadLabels: TypeAlias = Callable[[float], LabelMetric | str]  # since a time; a text is why there is no metric


def compare_versions(
    stable: RequestCounts, canary: RequestCounts, settings: Rollout, metric: LabelMetric | str = "they are not read"
) -> CanaryResult:
    """Decide whether the canary is not inferior in failed and slow requests and in the metric, with confidence."""
    comparisons = [*_compare_requests(stable, canary, settings), *_compare_metric(metric, settings.min_labels)]
    worst_first: tuple[Outcome, ...] = ("roll back", "inconclusive", "promote")
    outcome = min((outcome for outcome, _ in comparisons), key=worst_first.index)
    return CanaryResult(outcome, "; ".join(text for _, text in comparisons))


def _compare_metric(metric: LabelMetric | str, needed: int) -> Iterator[Comparison]:
    """Compare by confidence sequences, which hold at all times; unless labels are needed, they only end a canary."""
    waits: Outcome = "inconclusive" if needed else "promote"
    if isinstance(metric, str):
        if needed:
            yield waits, f"no labels, as {metric}; {needed} of each version are needed"
        return
    stable, canary = metric.stable, metric.canary
    larger, smaller = (canary, stable) if metric.lower else (stable, canary)
    least, most = larger.low - smaller.high, larger.high - smaller.low
    values = f"{metric.name}: {canary.mean:.2%} on {canary.labels} labels compared with {stable.mean:.2%} on "
    values += f"{stable.labels}"
    if least > metric.margin:
        yield "roll back", f"{values}, at least {least:.2%} worse; {metric.margin:.2%} is allowed"
    elif min(canary.labels, stable.labels) < max(needed, 1):
        counts = f"{metric.name}: {canary.labels} labels for the canary and {stable.labels} for the stable version"
        yield waits, counts + (f", {needed} of each are needed" if needed else "")
    elif most <= metric.margin:
        yield "promote", f"{values}, at most {max(most, 0):.2%} worse"
    else:
        yield waits, f"{values}, up to {most:.2%} worse; at most {metric.margin:.2%} is not shown yet"


def _compare_requests(stable: RequestCounts, canary: RequestCounts, settings: Rollout) -> list[Comparison]:
    if min(stable.requests, canary.requests) < settings.min_requests:
        counts = f"{canary.requests:.0f} requests to the canary and {stable.requests:.0f} to the stable version"
        return [("inconclusive", f"{counts}, {settings.min_requests} of each are needed")]
    if not settings.min_requests and not (stable.requests and canary.requests):
        return [("promote", "no requests to compare; the golden requests were answered as at export")]
    z = NormalDist().inv_cdf(_CONFIDENCE)
    failed = [(counts.failed, counts.requests) for counts in (canary, stable)]
    comparisons = [_compare_rates("failed", failed[0], failed[1], settings.margin, z)]
    if stable.timed and canary.timed:
        threshold = stable.seconds_of(_FAST_FRACTION)
        slow = [
            (counts.timed - counts.answered_within.get(threshold, 0.0), counts.timed) for counts in (canary, stable)
        ]
        comparisons.append(_compare_rates(f"slower than {threshold * 1000:g} ms", slow[0], slow[1], _SLOW_MARGIN, z))
    return comparisons


def _compare_rates(
    subject: str, canary: tuple[float, float], stable: tuple[float, float], margin: float, z: float
) -> Comparison:
    """Compare two rates by the interval of their difference (Newcombe's, from two Wilson intervals)."""
    canary_rate, stable_rate = canary[0] / canary[1], stable[0] / stable[1]
    (canary_low, canary_high), (stable_low, stable_high) = _wilson_interval(*canary, z), _wilson_interval(*stable, z)
    difference = canary_rate - stable_rate
    upper = difference + math.hypot(canary_high - canary_rate, stable_rate - stable_low)
    lower = difference - math.hypot(canary_rate - canary_low, stable_high - stable_rate)
    rates = f"{subject}: {canary_rate:.2%} compared with {stable_rate:.2%}"
    if upper <= margin:
        return "promote", f"{rates}, at most {max(upper, 0):.2%} more"
    if lower > margin:
        return "roll back", f"{rates}, at least {lower:.2%} more; {margin:.2%} is allowed"
    return "inconclusive", f"{rates}, up to {upper:.2%} more; at most {margin:.2%} is not shown yet"


def _wilson_interval(count: float, total: float, z: float) -> tuple[float, float]:
    rate = count / total
    center = (rate + z * z / (2 * total)) / (1 + z * z / total)
    half_width = z / (1 + z * z / total) * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    return max(0.0, center - half_width), min(1.0, center + half_width)


def traffic_steps(first: float) -> list[float]:
    """Return the percentages of requests that a canary gets before it gets all of them."""
    return [first, _SECOND_STEP_PERCENT] if first < _SECOND_STEP_PERCENT else [first]


def observe(
    read: Callable[[], tuple[Readings, Readings]],
    settings: Rollout,
    report: Callable[[str], None],
    labels: ReadLabels | None = None,
) -> CanaryResult:
    """Compare the requests since now, again and again until the comparison is conclusive.

    `read` returns the counters of the stable version's pods and of the canary's, by pod.
    """
    began = time.time()
    stable_before, canary_before = read()
    for _ in range(OBSERVATION_ATTEMPTS):
        time.sleep(settings.observe_seconds)
        stable, canary = read()
        result = CanaryResult("inconclusive", "a version has no pod that answers")
        if stable and canary:
            counts = _sum_since(stable_before, stable), _sum_since(canary_before, canary)
            result = compare_versions(*counts, settings, *([labels(began)] if labels else []))
        if result.outcome != "inconclusive":
            return result
        report(f"canary: {result.text}")
    waited_seconds = OBSERVATION_ATTEMPTS * settings.observe_seconds
    return CanaryResult("roll back", f"inconclusive after {waited_seconds} s: {result.text}")


def _sum_since(earlier: Readings, now: Readings) -> RequestCounts:
    increases = (counts.since(earlier.get(pod, RequestCounts())) for pod, counts in now.items())
    return sum(increases, RequestCounts())
