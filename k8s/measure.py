"""What pods count of their requests, read from the text they show to Prometheus; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Of gRPC; HTTP's begin with a 5. What clients did wrong is not counted against a bundle.
_FAILED = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS")


@dataclass(frozen=True)
class Sample:
    """Requests of one version over some time."""

    requests: float = 0.0
    failed: float = 0.0
    within: Mapping[float, float] = field(default_factory=dict)  # seconds → answered within them

    @property
    def timed(self) -> float:
        return self.within.get(math.inf, 0.0)

    def __add__(self, other: Sample) -> Sample:
        bounds = self.within.keys() | other.within.keys()
        within = {bound: self.within.get(bound, 0.0) + other.within.get(bound, 0.0) for bound in bounds}
        return Sample(self.requests + other.requests, self.failed + other.failed, within)

    def since(self, before: Sample) -> Sample:
        """A pod that counts less than before has started anew."""
        if self.requests < before.requests or self.failed < before.failed or self.timed < before.timed:
            return self
        within = {bound: count - before.within.get(bound, 0.0) for bound, count in self.within.items()}
        return Sample(self.requests - before.requests, self.failed - before.failed, within)


def read(text: str, model: str) -> Sample:
    """All of one model, over its protocols."""
    requests = failed = 0.0
    within: dict[float, float] = {}
    for name, labels, value in _samples(text.splitlines()):
        if labels.get("model") != model:
            continue
        if name == "pipe_requests_total":
            requests += value
            failed += value if labels["code"].startswith("5") or labels["code"] in _FAILED else 0.0
        elif name == "pipe_request_seconds_bucket":
            bound = float(labels["le"])
            within[bound] = within.get(bound, 0.0) + value
    return Sample(requests, failed, within)


def total(samples: Iterable[Sample]) -> Sample:
    return sum(samples, Sample())


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in lines:
        if found := _SAMPLE.match(line):
            yield found["name"], dict(_LABEL.findall(found["labels"] or "")), float(found["value"])
