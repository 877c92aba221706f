"""Decides from what the API server shows whether a roll-out is complete, and why it is not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from k8s.manifest import Object


@dataclass(frozen=True)
class Progress:
    done: bool
    text: str
    failed: bool = False  # waiting longer cannot help


def judge(live: Object) -> Progress:
    """The state of a Deployment or an InferenceService; a status older than the spec counts for nothing."""
    status = live.get("status", {})
    if live["kind"] == "InferenceService":
        # KServe fills observedGeneration only since 0.16.
        observed = status.get("observedGeneration", live["metadata"].get("generation", 0))
    else:
        observed = status.get("observedGeneration", 0)
    if observed < live["metadata"].get("generation", 0):
        return Progress(False, "waiting for the controller to see the new version")
    return _judge_service(status) if live["kind"] == "InferenceService" else _judge_deployment(live, status)


def made_of(live: Object) -> Object:
    """What KServe makes of a service: in Knative mode a Revision, else a Deployment."""
    revision = live.get("status", {}).get("components", {}).get("predictor", {}).get("latestReadyRevision")
    if revision:
        return {"apiVersion": "serving.knative.dev/v1", "kind": "Revision", "metadata": {"name": revision}}
    name = f"{live['metadata']['name']}-predictor"
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}


def pod_troubles(pods: Iterable[Object]) -> list[str]:
    """One sentence for each pod that cannot start, with the reason the cluster gives."""
    return [f"{pod['metadata']['name']}: {trouble}" for pod in pods if (trouble := pod_trouble(pod))]


def pod_trouble(pod: Object) -> str | None:
    """Why a pod cannot start, or how it failed, with the reason the cluster gives."""
    status = pod.get("status", {})
    for container in _containers(status):
        waiting: Any = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return f"{reason}: {_detail(container, waiting)}"
        ended = container.get("state", {}).get("terminated", {})
        if ended.get("exitCode"):
            return how_it_ended(ended)
    scheduled = _conditions(status).get("PodScheduled", {})
    if status.get("phase") == "Pending" and scheduled.get("status") == "False":
        return f"Pending: {scheduled.get('message') or scheduled.get('reason', 'not scheduled')}"
    if status.get("phase") == "Failed":
        return f"{status.get('reason', 'Failed')}: {status.get('message', 'the pod failed')}"
    return None


def crashed(pods: Iterable[Object]) -> list[tuple[str, str, bool]]:
    """Pod and container of each process that ended badly, and whether the one before it is meant: its log says why."""
    found = []
    for pod in pods:
        for container in _containers(pod.get("status", {})):
            now, before = (container.get(state, {}).get("terminated", {}) for state in ("state", "lastState"))
            if now.get("exitCode") or before.get("exitCode"):
                found.append((pod["metadata"]["name"], container.get("name", ""), not now.get("exitCode")))
    return found


def how_it_ended(ended: Object) -> str:
    said = f", {ended['message'].strip()}" if ended.get("message") else ""
    killed = "; it needs more memory than its limit" if ended.get("reason") == "OOMKilled" else ""
    return (
        f"the container ended with {ended.get('reason', 'an error')}, exit code {ended.get('exitCode')}{said}{killed}"
    )


def _judge_deployment(live: Object, status: Object) -> Progress:
    conditions = _conditions(status)
    failure = conditions.get("ReplicaFailure", {})
    if failure.get("status") == "True":
        return Progress(False, f"no pod can be made: {failure.get('message', failure.get('reason', 'unknown'))}")
    progressing = conditions.get("Progressing", {})
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        return Progress(False, progressing.get("message", "progress deadline exceeded"), failed=True)
    wanted = live["spec"].get("replicas", 1)
    updated, total = status.get("updatedReplicas", 0), status.get("replicas", 0)
    available = status.get("availableReplicas", 0)
    if updated < wanted:
        return Progress(False, f"{updated} of {wanted} replicas updated")
    if total > updated:
        return Progress(False, f"{total - updated} old replicas still end")
    if available < updated:
        return Progress(False, f"{available} of {updated} updated replicas available")
    return Progress(True, f"{available} replicas available")


def _judge_service(status: Object) -> Progress:
    conditions = _conditions(status)
    ready = conditions.get("Ready", {})
    predictor = status.get("components", {}).get("predictor", {})
    made, proven = predictor.get("latestCreatedRevision"), predictor.get("latestReadyRevision")
    if ready.get("status") == "True" and made != proven:
        return Progress(False, f"revision {made} is not ready, {proven} serves")
    if ready.get("status") == "True":
        return Progress(True, "ready")
    waiting = (item for item in conditions.values() if item.get("status") == "False")
    texts = [f"{item['type']}: {item.get('message') or item.get('reason') or 'not ready'}" for item in waiting]
    return Progress(False, "; ".join(sorted(texts)) or "not ready")


def _conditions(status: Object) -> dict[str, Object]:
    return {item["type"]: item for item in status.get("conditions", [])}


def _containers(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def _detail(container: Object, waiting: Object) -> str:
    """For a crash, how the process ended says more than how long the kubelet waits."""
    ended = container.get("lastState", {}).get("terminated")
    return how_it_ended(ended) if ended else str(waiting.get("message", "no message"))
