"""A canary on the cluster: a second Deployment behind the same Service, proven, watched, and judged share by share.

Decides of a canary: how many pods it gets, and whether it may go on beside what serves; pure.

A service of KServe in Knative mode: its revisions, the Service of each, and a canary whose share Knative gives.

What pods count of their requests, read from the text they show to Prometheus; pure.
"""

from __future__ import annotations

import copy
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from k8s.cluster import smoke
from k8s.cluster.cluster import Cluster, Say
from k8s.objects.kustomize import Object
from k8s.objects.manifests import HTTP_PORT
from pipeline.contract.bundle import Bundle
from pipeline.contract.errors import PipelineError, StageError
from pipeline.contract.settings.cluster import Rollout

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


TRACK = "pipe-road/track"
_OK, _GONE = 200, 404


@dataclass(frozen=True)
class Trial:
    """Of one bundle beside the one that serves."""

    cluster: Cluster
    namespace: str
    bundle: Bundle
    made: Object  # its Deployment
    stable: Object  # as it is on the cluster
    rules: Rollout
    timeout_seconds: float
    entry: Mapping[str, str]  # headers that open the service
    https: bool
    say: Say
    check: Callable[[], None]  # raises when somebody else deploys
    sleep: Callable[[float], None] = time.sleep

    def walk(self) -> Judgement:
        """Share by share as far as it is to go by itself; whatever is wrong ends it, and the stable version serves."""
        last = Judgement("watch", ("it is watched by people: `pipe promote` or `pipe rollback` ends it",))
        try:
            for percent in shares(self.rules.canary) if self.rules.auto else [self.rules.canary]:
                self._give(percent)
                if not self.rules.auto:
                    return last
                last = self._judge()
                self.say(f"canary at {percent:g} %: {last.verdict}: {last.text}")
                if last.verdict != "go on":
                    self.end()
                    return Judgement("go back", last.reasons)
        except BaseException:
            self._end_all_the_same()
            raise
        return last

    def end(self) -> None:
        self.cluster.delete(self.made, self.namespace)

    def _end_all_the_same(self) -> None:
        """What went wrong is what is to be told."""
        try:
            self.end()
        except PipelineError as error:
            self.say(f"warning: the canary could not be ended, `pipe rollback` does it: {error}")

    def _give(self, percent: float) -> None:
        """Pods for a share, waited for and proven one by one."""
        self.check()
        wanted = self.stable.get("status", {}).get("replicas") or self.stable["spec"].get("replicas", 1)
        self.say(f"canary: {share_told(percent, wanted)}")
        item = copy.deepcopy(self.made)
        item["spec"]["replicas"] = replicas_for(percent, wanted)
        self.cluster.apply([item], self.namespace, self.say, self.rules.take_over)
        self.cluster.wait([item], self.namespace, self.timeout_seconds, self.say)
        for pod in self._own():
            asked = smoke.check_pod(self.cluster, self.namespace, self._address(pod), self.bundle, self.entry)
            self.say(f"{pod}: {asked} golden requests answered as at export")

    def _judge(self) -> Judgement:
        before = self._count()
        found = Judgement("watch", ())
        for _ in range(self.rules.patience):
            self.sleep(self.rules.observe_seconds)
            self.check()
            now = self._count()
            stable, ours = (_grown(before[track], now[track]) for track in (0, 1))
            found = judge(stable, ours, self.rules)
            if found.verdict != "watch":
                return found
            self.say(f"canary: {found.text}")
        waited = self.rules.patience * self.rules.observe_seconds
        return Judgement("go back", (f"not shown within {waited} s: {found.text}",))

    def _count(self) -> tuple[dict[str, Sample], dict[str, Sample]]:
        """What the pods of both versions have counted so far, by pod."""
        ours, others = self._own(), self._others()
        return self._read(others), self._read(ours)

    def _read(self, pods: Sequence[str]) -> dict[str, Sample]:
        """Of those that are still there: an autoscaler may take one away between two looks."""
        found = {}
        for pod in pods:
            status, text = smoke.read_metrics(self.cluster, self.namespace, self._address(pod), self.entry)
            if status == _GONE:
                continue
            if status != _OK:
                raise StageError(f"{pod}: its /metrics answered {status}; without them a canary cannot be judged")
            found[pod] = read(text, self.bundle.name)
        return found

    def _own(self) -> list[str]:
        return running(self.cluster.pods(self.made, self.namespace))

    def _others(self) -> list[str]:
        """Of the stable version, whose labels the canary's pods bear too."""
        ours = set(self._own())
        return [pod for pod in running(self.cluster.pods(self.stable, self.namespace)) if pod not in ours]

    def _address(self, pod: str) -> str:
        return f"{'https:' if self.https else ''}{pod}:{HTTP_PORT}"


def deployment_of(objects: Sequence[Object]) -> Object:
    """The canary's own: the same pods, told apart by a label, so that the stable Deployment never counts them."""
    item = copy.deepcopy(next(item for item in objects if item["kind"] == "Deployment"))
    item["metadata"]["name"] = canary_name(item["metadata"]["name"])
    template = item["spec"]["template"]
    for labels in (item["metadata"]["labels"], item["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
        labels[TRACK] = "canary"
    return item


def canary_name(name: str) -> str:
    return f"{name}-canary"


def running(pods: Iterable[Object]) -> list[str]:
    """The names of those that answer."""
    return sorted(pod["metadata"]["name"] for pod in pods if _runs(pod))


def _runs(pod: Object) -> bool:
    conditions = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _grown(before: Mapping[str, Sample], now: Mapping[str, Sample]) -> Sample:
    return total(sample.since(before.get(pod, Sample())) for pod, sample in now.items())


_REVISION = "serving.knative.dev/revision"  # the label of its pods
_PROXY_PORT = 8012  # of Knative's proxy in each pod, which alone takes requests
SHARE = "canaryTrafficPercent"


def newest(live: Object) -> str:
    """The revision that was made last of those that are ready; empty where there is none."""
    return str(_predictor(live).get("latestReadyRevision", ""))


def stable(live: Object) -> str:
    """The one that had all requests last: KServe remembers it while another one is tried."""
    return str(_predictor(live).get("latestRolledoutRevision") or newest(live))


def service_of(cluster: Cluster, service: Object, namespace: str) -> str:
    """The Service before the pods of the newest revision: the one that clients know only names a gateway elsewhere."""
    live = cluster.read(service, namespace)
    revision = newest(live) if live else ""
    if not revision:
        raise StageError(f"inferenceservice/{service['metadata']['name']}: Knative names no revision that is ready")
    return f"{revision}-private"


def share_of(live: Object) -> int | None:
    """What the newest revision gets, where that is not everything."""
    found: int | None = live["spec"]["predictor"].get(SHARE)
    return found


@dataclass(frozen=True)
class KnativeTrial(Trial):
    """Here `made` is the InferenceService of the candidate, and `stable` what was there before."""

    def end(self) -> None:
        """As KServe goes back: the candidate stays in the object, and gets nothing."""
        self._apply(0)
        self.say("the revision before gets all requests again; `pipe rollback` takes the candidate out of the object")

    def _give(self, percent: float) -> None:
        self.check()
        share = max(1, round(percent))
        self.say(f"canary: Knative gives it {share} % of the requests")
        item = self._apply(share)
        self.cluster.wait([item], self.namespace, self.timeout_seconds, self.say)
        service = service_of(self.cluster, item, self.namespace)
        asked = smoke.check(self.cluster, self.namespace, service, self.bundle, self.say, self.entry)
        self.say(f"{service}: {asked} golden requests answered as at export")

    def _apply(self, share: int) -> Object:
        item = copy.deepcopy(self.made)
        item["spec"]["predictor"][SHARE] = share
        self.cluster.apply([item], self.namespace, self.say, self.rules.take_over)
        return item

    def _own(self) -> list[str]:
        live = self.cluster.read(self.made, self.namespace)
        return self._of(newest(live)) if live else []

    def _others(self) -> list[str]:
        return self._of(stable(self.stable))

    def _of(self, revision: str) -> list[str]:
        return running(self.cluster.select(f"{_REVISION}={revision}", self.namespace))

    def _address(self, pod: str) -> str:
        return f"{pod}:{_PROXY_PORT}"


def _predictor(live: Object) -> Object:
    found: Object = live.get("status", {}).get("components", {}).get("predictor", {})
    return found
