"""Decides of a canary: how many pods it gets, and whether it may go on beside what serves; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from k8s.measure import Sample
from pipeline.spec.rollout import Rollout

_QUICK = 0.95  # of the stable requests; slower than these is slow
_THEN = 50.0  # percent, after the first share and before all


@dataclass(frozen=True)
class Judgement:
    verdict: Literal["go on", "watch", "go back"]
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        return "; ".join(self.reasons)


def shares(first: float) -> list[float]:
    """In percent, before all requests are given to it."""
    return [first, _THEN] if first < _THEN else [first]


def replicas_for(percent: float, stable: int) -> int:
    """Pods whose share comes nearest, as each pod behind a Service gets as many requests as any other."""
    return max(1, round(stable * percent / (100 - percent)))


def share_told(percent: float, stable: int) -> str:
    """What share pods can give, in words."""
    pods = replicas_for(percent, stable)
    given = 100 * pods / (pods + stable)
    text = f"{pods} pod{'s' * (pods > 1)} beside {stable} get about {given:.0f} % of the requests"
    if abs(given - percent) > 1:
        needed = math.ceil((100 - percent) / percent)
        text += f" ({percent:g} % was asked for, which takes {needed} stable pods to one)" if given > percent else ""
    return text


def judge(stable: Sample, canary: Sample, rules: Rollout) -> Judgement:
    """Not inferior, shown with confidence, in failures and in time: as the gate asks it of a candidate."""
    if min(stable.requests, canary.requests) < rules.requests:
        few = f"{canary.requests:.0f} requests to the canary and {stable.requests:.0f} to the stable version"
        return Judgement("watch", (f"{few}, {rules.requests} of each are needed",))
    if not rules.requests and not (stable.requests and canary.requests):
        return Judgement("go on", ("no requests came to compare; the golden ones were answered as at export",))
    z = NormalDist().inv_cdf(rules.confidence)
    judged = [_compare("failed", (canary.failed, canary.requests), (stable.failed, stable.requests), rules.margin, z)]
    if stable.timed and canary.timed:
        bound = _bound(stable)
        slow = [(sample.timed - sample.within.get(bound, 0.0), sample.timed) for sample in (canary, stable)]
        judged.append(_compare(f"slower than {bound * 1000:g} ms", slow[0], slow[1], rules.slow_margin, z))
    verdicts = {verdict for verdict, _ in judged}
    verdict = next(one for one in ("go back", "watch", "go on") if one in verdicts)
    return Judgement(verdict, tuple(text for _, text in judged))


def _bound(stable: Sample) -> float:
    """The time that most stable requests keep, as far as buckets tell."""
    kept = (bound for bound, count in sorted(stable.within.items()) if count >= _QUICK * stable.timed)
    return next(kept, math.inf)


def _compare(
    what: str, canary: tuple[float, float], stable: tuple[float, float], margin: float, z: float
) -> tuple[str, str]:
    """The difference of two shares with its bounds (Newcombe's, of two Wilson intervals)."""
    ours, theirs = canary[0] / canary[1], stable[0] / stable[1]
    (low, high), (least, most) = _wilson(*canary, z), _wilson(*stable, z)
    difference = ours - theirs
    upper = difference + math.hypot(high - ours, theirs - least)
    lower = difference - math.hypot(ours - low, most - theirs)
    numbers = f"{what}: {ours:.2%} against {theirs:.2%}"
    if upper <= margin:
        return "go on", f"{numbers}, at most {max(upper, 0):.2%} more"
    if lower > margin:
        return "go back", f"{numbers}, at least {lower:.2%} more; {margin:.2%} is allowed"
    return "watch", f"{numbers}, perhaps {upper:.2%} more; at most {margin:.2%} is not shown yet"


def _wilson(count: float, of: float, z: float) -> tuple[float, float]:
    share = count / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    spread = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, middle - spread), min(1.0, middle + spread)
