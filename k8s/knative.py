"""A service of KServe in Knative mode: its revisions, the Service of each, and a canary whose share Knative gives."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from k8s import smoke
from k8s.cluster import Cluster
from k8s.manifest import Object
from k8s.trial import Trial, running
from pipeline.spec.errors import StageError

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
