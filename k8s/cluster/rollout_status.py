"""Decides from what the API server shows whether a roll-out is complete, and why it is not.

Decides from a Job, JobSet or TrainJob and its pods how the work stands, and how it ended; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k8s.objects.kustomize import Object


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


INDEX = "batch.kubernetes.io/job-completion-index"
_ENDED = ("Succeeded", "Failed")
_DONE = ("Complete", "Completed")  # a JobSet says the second
# No patience of ours would end these; a pod that waits for a free node may wait for days.
_HOPELESS = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip


@dataclass(frozen=True)
class Ending:
    status: int  # as a process's
    reason: str = ""


def ending(job: Object, pods: Sequence[Object]) -> Ending | None:
    """None while the Job is under way."""
    conditions = {
        item["type"]: item for item in job.get("status", {}).get("conditions", []) if item["status"] == "True"
    }
    if any(word in conditions for word in _DONE):
        return Ending(0)
    failed = conditions.get("Failed")
    if failed is None:
        return None
    own = [pod for pod in pods if over(pod) and _is_of(pod, job)]
    found = sorted(((_code(pod), pod) for pod in own if _code(pod)), key=_first)
    said = "; ".join(trouble for _, pod in found if (trouble := pod_trouble(pod)))
    why = f"{failed.get('reason', 'Failed')}: {failed.get('message', 'no message')}"
    return Ending(found[0][0] if found else 1, f"{said} ({why})" if said else why)


def over(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in _ENDED


def started(pod: Object) -> bool:
    """There is a log, or there was one."""
    return pod.get("status", {}).get("phase") not in (None, "Pending")


def hopeless(pods: Iterable[Object]) -> str:
    """What the pods wait for and will not get; empty where waiting may help."""
    troubles = [(pod, trouble) for pod in pods if not over(pod) and (trouble := pod_trouble(pod))]
    return "; ".join(f"{pod['metadata']['name']}: {text}" for pod, text in troubles if text.startswith(_HOPELESS))


def progress(job: Object, pods: Sequence[Object], wanted: int, reasons: Sequence[str] = ()) -> str:
    """One line for people, said again when it changes; `reasons` are what only the cluster's events say."""
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    running, done = phases.count("Running"), phases.count("Succeeded")
    if job["spec"].get("suspend"):
        return "; ".join([f"the {job['kind']} waits in its queue", *reasons])
    parts = [f"{running} of {wanted} pods run" if wanted > 1 else "its pod runs" if running else "its pod has to start"]
    if wanted == 1 and done:
        parts = ["its pod has ended"]
    elif done:
        parts.append(f"{done} are done")
    troubles = [f"{pod['metadata']['name']}: {trouble}" for pod in pods if (trouble := pod_trouble(pod))]
    return "; ".join([", ".join(parts), *troubles, *reasons])


def rank_of(pod: Object) -> str:
    """The number of the pod in its Job; empty where there are no numbers."""
    metadata = pod["metadata"]
    return str(metadata.get("annotations", {}).get(INDEX) or metadata.get("labels", {}).get(INDEX, ""))


def _is_of(pod: Object, job: Object) -> bool:
    """Not of an earlier Job of the same name; the pods of a JobSet or TrainJob belong to Jobs in between."""
    owners = [owner["uid"] for owner in pod["metadata"].get("ownerReferences", []) if owner["kind"] == job["kind"]]
    return not owners or job["metadata"].get("uid") in owners


def _code(pod: Object) -> int:
    """The exit code of the container that failed; 0 for none."""
    states = [item.get("state", {}) for item in pod["status"].get("containerStatuses", [])]
    return next((code for state in states if (code := state.get("terminated", {}).get("exitCode", 0))), 0)


def _first(found: tuple[int, Object]) -> tuple[bool, str]:
    """Who was told to end (143) or was killed (137) mostly follows another that failed by itself."""
    return found[0] in (137, 143), found[1]["metadata"]["name"]
