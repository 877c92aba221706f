"""Canaries on the cluster: a new version next to the stable one, verified, measured and promoted or rolled back.

The Deployment gets a second Deployment behind the same Service; the ratio of their pods sets the traffic. The pods' own
request counters are compared, as `pipeline.contract.canary` describes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from k8s.cluster import smoke
from k8s.cluster.cluster import Cluster, Report
from k8s.objects.kustomize import Object
from k8s.objects.manifests import HTTP_PORT, TRACK_LABEL
from pipeline.contract.canary import (
    CanaryResult,
    ReadLabels,
    RequestCounts,
    observe,
    parse_request_counts,
    traffic_steps,
)
from pipeline.contract.settings.cluster import Rollout
from pipeline.system.errors import PipelineError, StageError

_HTTP_OK, _HTTP_UNAUTHORIZED, _HTTP_NOT_FOUND = 200, 401, 404


def replicas_for(percent: float, stable: int) -> int:
    """Return the number of pods whose percentage comes nearest: a Service gives every pod as many connections."""
    return max(1, round(stable * percent / (100 - percent)))


def describe_traffic(percent: float, stable: int) -> str:
    """Describe the percentage that the pods really get, and the number of pods that the requested one needs."""
    pods = replicas_for(percent, stable)
    actual_percent = 100 * pods / (pods + stable)
    text = f"{pods} pod{'s' * (pods > 1)} next to {stable} get about {actual_percent:.0f} % of the connections"
    if actual_percent > percent + 1:
        needed_pods = math.ceil((100 - percent) / percent)
        text += f" ({percent:g} % needs {needed_pods} stable pods for each pod of the canary)"
    return text


@dataclass(frozen=True)
class CanaryRollout:
    """A canary of one bundle, as a second Deployment next to the stable one."""

    cluster: Cluster
    name: str  # of the model
    expected: smoke.Expected
    candidate: Object  # the canary's Deployment
    stable: Object  # the stable version's Deployment, as it is on the cluster
    settings: Rollout
    timeout_seconds: float
    headers: Mapping[str, str]  # credentials of the service
    report: Report
    check_lease: Callable[[], None]  # raises once another deployment has started
    labels: ReadLabels | None = None

    def run(self) -> CanaryResult:
        """Raise the traffic step by step; any error ends the canary, and the stable version gets all requests again.

        Without `rollout.auto` only the first step is made, and the canary stays until a person ends it. A canary that
        is there already, as after an interruption, goes on with the step that it had reached.
        """
        try:
            if not self.settings.auto:
                self._set_traffic(self.settings.canary_percent)
                return CanaryResult("inconclusive", "`pipe registry promote` or `pipe registry rollback` ends it")
            live = self.cluster.read(self.candidate)
            steps = traffic_steps(self.settings.canary_percent)
            if live is not None and live["spec"]["replicas"] > replicas_for(steps[0], self._stable_replicas):
                steps = steps[-1:]
            for percent in steps:
                self._set_traffic(percent)
                result = observe(self._read_counts, self.settings, self.report, self.labels)
                self.report(f"canary at {percent:g} %: {result.outcome}: {result.text}")
                if result.outcome != "promote":
                    self.end()
                    return CanaryResult("roll back", result.text)
        except Exception:
            try:
                self.end()
            except PipelineError as error:  # it must not hide the error that led here
                self.report(f"warning: the canary could not be ended: {error}; to fix it: `pipe registry rollback`")
            raise
        except BaseException:
            self.report("the canary stays: `pipe deploy --watch` goes on with it, `pipe registry rollback` ends it")
            raise
        return result

    def end(self) -> None:
        """Give all requests back to the stable version."""
        self.cluster.delete(self.candidate)

    def _set_traffic(self, percent: float) -> None:
        """Scale the canary for a percentage, wait for its pods, and send the golden requests to each."""
        self.check_lease()
        self.report(f"canary: {describe_traffic(percent, self._stable_replicas)}")
        item = copy.deepcopy(self.candidate)
        item["spec"]["replicas"] = replicas_for(percent, self._stable_replicas)
        self.cluster.apply([item], self.report)
        self.cluster.wait([item], self.timeout_seconds, self.report)
        for pod in self._canary_pods():
            count = smoke.check_pod(self.cluster, self._pod_address(pod, self.candidate), self.expected, self.headers)
            self.report(f"{pod}: {self.expected.describe(count)}")

    @property
    def _stable_replicas(self) -> int:
        return int(self.stable.get("status", {}).get("replicas") or self.stable["spec"].get("replicas", 1))

    def _read_counts(self) -> tuple[dict[str, RequestCounts], dict[str, RequestCounts]]:
        """Return the counters of the stable version's pods and of the canary's, by pod."""
        self.check_lease()
        canary_pods = self._canary_pods()
        # The stable version's labels select the canary's pods as well.
        stable_pods = [pod for pod in ready_pods(self.cluster.pods(self.stable)) if pod not in canary_pods]
        return self._read_metrics(stable_pods, self.stable), self._read_metrics(canary_pods, self.candidate)

    def _read_metrics(self, pods: Sequence[str], owner: Object) -> dict[str, RequestCounts]:
        """Skip pods that an autoscaler has removed since they were listed."""
        counts = {}
        for pod in pods:
            address = self._pod_address(pod, owner)
            status, text = smoke.read_metrics(self.cluster, address, self.headers)
            if status == _HTTP_NOT_FOUND:
                continue
            if status == _HTTP_UNAUTHORIZED:
                raise StageError(
                    f"{pod}: GET /metrics does not accept our API key; a canary needs one that both versions accept: "
                    "keep it in the file of serve.api_keys, and set PIPE_API_KEY to it"
                )
            if status != _HTTP_OK:
                raise StageError(f"{pod}: GET /metrics returned {status}; a canary needs them to be measured")
            counts[pod] = parse_request_counts(text, self.name)
        return counts

    def _canary_pods(self) -> list[str]:
        return ready_pods(self.cluster.pods(self.candidate))

    def _pod_address(self, pod: str, owner: Object) -> str:
        """Return the address for the API server's proxy; one version may use TLS and the other not."""
        return pod_address(pod, owner["spec"]["template"]["spec"])


def canary_deployment(objects: Sequence[Object]) -> Object:
    """Copy the Deployment under another name; the extra label keeps the stable Deployment from adopting its pods."""
    item = copy.deepcopy(next(item for item in objects if item["kind"] == "Deployment"))
    item["metadata"]["name"] = canary_name(item["metadata"]["name"])
    template = item["spec"]["template"]
    for labels in (item["metadata"]["labels"], item["spec"]["selector"]["matchLabels"], template["metadata"]["labels"]):
        labels[TRACK_LABEL] = "canary"
    return item


def pod_address(pod: str, spec: Object) -> str:
    """Return a pod's address for the API server's proxy."""
    return f"{'https:' if uses_tls(spec) else ''}{pod}:{HTTP_PORT}"


def uses_tls(spec: Object) -> bool:
    return any("--tls-key" in container.get("args", []) for container in spec["containers"])


def canary_name(name: str) -> str:
    return f"{name}-canary"


def ready_pods(pods: Iterable[Object]) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in pods if is_ready(pod))


def is_ready(pod: Object) -> bool:
    conditions = {item["type"]: item["status"] for item in pod.get("status", {}).get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
