"""A canary on the cluster: a second Deployment behind the same Service, proven, watched, and judged share by share."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from k8s import canary, measure, smoke
from k8s.canary import Judgement
from k8s.cluster import Cluster, Say
from k8s.manifest import HTTP_PORT, Object
from k8s.measure import Sample
from pipeline.spec.bundle import Bundle
from pipeline.spec.errors import PipelineError, StageError
from pipeline.spec.rollout import Rollout

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
            for percent in canary.shares(self.rules.canary) if self.rules.auto else [self.rules.canary]:
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
        self.say(f"canary: {canary.share_told(percent, wanted)}")
        item = copy.deepcopy(self.made)
        item["spec"]["replicas"] = canary.replicas_for(percent, wanted)
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
            found = canary.judge(stable, ours, self.rules)
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
            found[pod] = measure.read(text, self.bundle.name)
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
    return measure.total(sample.since(before.get(pod, Sample())) for pod, sample in now.items())
