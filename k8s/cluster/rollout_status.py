"""The state of roll-outs, Jobs and pods, read from their status: is it complete, does it wait, why did it fail.

Pure functions over what the API server returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k8s.objects.kustomize import Object

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_FINISHED_PHASES = ("Succeeded", "Failed")
_MINIMUM = {"HorizontalPodAutoscaler": "minReplicas", "ScaledObject": "minReplicaCount"}  # kind → field
_SUCCESS_CONDITIONS = ("Complete", "Completed")  # of a Job and of a JobSet
# Waiting does not help with these; a pod that waits for a free node, by contrast, may wait for days.
_UNRECOVERABLE_REASONS = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError",
    "CreateContainerError", "RunContainerError",
)  # fmt: skip
_KILLED_EXIT_CODES = (137, 143)  # SIGKILL and SIGTERM


@dataclass(frozen=True)
class Progress:
    done: bool
    text: str
    failed: bool = False  # waiting longer cannot help


def minimum_replicas(workload: Object, objects: Iterable[Object]) -> int:
    """Return the replicas that the autoscaler will set at least; 0 without one."""
    if workload["kind"] == "InferenceService":
        return int(workload["spec"]["predictor"].get("minReplicas", 0))
    target = {"kind": workload["kind"], "name": workload["metadata"]["name"]}
    scalers = [(item["spec"], _MINIMUM[item["kind"]]) for item in objects if item["kind"] in _MINIMUM]
    return max(
        (int(spec[field]) for spec, field in scalers if target.items() <= spec["scaleTargetRef"].items()), default=0
    )


def rollout_progress(live: Object, replicas: int = 0) -> Progress:
    """Return the state of a Deployment or an InferenceService; a status older than the spec does not count.

    A new Deployment has one replica until the autoscaler has seen it, so at least `replicas` are required.
    """
    status = live.get("status", {})
    is_kserve, generation = live["kind"] == "InferenceService", live["metadata"].get("generation", 0)
    # KServe fills observedGeneration only since 0.16.
    if status.get("observedGeneration", generation if is_kserve else 0) < generation:
        return Progress(False, "waiting for the controller to see the new version")
    return _inference_service_progress(status) if is_kserve else _deployment_progress(live, status, replicas)


def _deployment_progress(live: Object, status: Object, minimum: int) -> Progress:
    conditions = read_conditions(status)
    failure = conditions.get("ReplicaFailure", {})
    if failure.get("status") == "True":
        return Progress(False, f"no pod can be created: {failure.get('message', failure.get('reason', 'unknown'))}")
    progressing = conditions.get("Progressing", {})
    if progressing.get("reason") == "ProgressDeadlineExceeded":
        return Progress(False, progressing.get("message", "progress deadline exceeded"), failed=True)
    replicas = max(live["spec"].get("replicas", 1), minimum)
    updated, total = status.get("updatedReplicas", 0), status.get("replicas", 0)
    available = status.get("availableReplicas", 0)
    if updated < replicas:
        return Progress(False, f"{updated} of {replicas} replicas updated")
    if total > updated:
        return Progress(False, f"{total - updated} old replicas still terminate")
    if available < updated:
        return Progress(False, f"{available} of {updated} updated replicas available")
    return Progress(True, f"{available} replicas available")


def _inference_service_progress(status: Object) -> Progress:
    conditions = read_conditions(status)
    if conditions.get("Ready", {}).get("status") == "True":
        return Progress(True, "ready")
    failing = (item for item in conditions.values() if item.get("status") == "False")
    texts = [f"{item['type']}: {item.get('message') or item.get('reason') or 'not ready'}" for item in failing]
    return Progress(False, "; ".join(sorted(texts)) or "not ready")


def created_workload(service: Object) -> Object:
    """Return the Deployment that KServe creates for an InferenceService."""
    name = f"{service['metadata']['name']}-predictor"
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}


@dataclass(frozen=True)
class JobResult:
    status: int  # the exit status of the step
    reason: str = ""


def job_result(job: Object, pods: Sequence[Object]) -> JobResult | None:
    """Return how a Job, JobSet or TrainJob ended; None while it runs."""
    conditions = read_conditions(job.get("status", {}))
    true_conditions = {kind: condition for kind, condition in conditions.items() if condition["status"] == "True"}
    if any(kind in true_conditions for kind in _SUCCESS_CONDITIONS):
        return JobResult(0)
    if (condition := true_conditions.get("Failed")) is None:
        return None
    failed = [pod for pod in pods if is_finished(pod) and _belongs_to(pod, job) and _exit_code(pod)]
    # Pods that were killed mostly follow another pod that failed by itself.
    failed.sort(key=lambda pod: (_exit_code(pod) in _KILLED_EXIT_CODES, pod["metadata"]["name"]))
    problems = "; ".join(problem for pod in failed if (problem := pod_problem(pod)))
    reason = f"{condition.get('reason', 'Failed')}: {condition.get('message', 'no message')}"
    return JobResult(_exit_code(failed[0]) if failed else 1, f"{problems} ({reason})" if problems else reason)


def job_progress(job: Object, pods: Sequence[Object], pod_count: int, reasons: Sequence[str] = ()) -> str:
    """Describe a running job in one line; `reasons` are those that only Kueue or events report."""
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    running, done = phases.count("Running"), phases.count("Succeeded")
    if job["spec"].get("suspend"):
        return "; ".join([f"the {job['kind']} waits in its queue", *reasons])
    if pod_count > 1:
        text = f"{running} of {pod_count} pods run" + (f", {done} are done" if done else "")
    else:
        text = "its pod has ended" if done else "its pod runs" if running else "its pod has not started"
    return "; ".join([text, *pod_problems(pods), *reasons])


def pod_problems(pods: Iterable[Object]) -> list[str]:
    """Return one sentence for each pod that cannot start or has failed."""
    return [f"{pod['metadata']['name']}: {problem}" for pod in pods if (problem := pod_problem(pod))]


def pod_problem(pod: Object) -> str | None:
    """Return why a pod cannot start, or how it failed, with the reason that the cluster gives."""
    status = pod.get("status", {})
    for container in _container_statuses(status):
        waiting: Any = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            crash = container.get("lastState", {}).get("terminated")  # of a process that crashes repeatedly
            return f"{reason}: {describe_termination(crash) if crash else waiting.get('message', 'no message')}"
        terminated = container.get("state", {}).get("terminated", {})
        if terminated.get("exitCode"):
            return describe_termination(terminated)
    scheduled = read_conditions(status).get("PodScheduled", {})
    if status.get("phase") == "Pending" and scheduled.get("status") == "False":
        return f"Pending: {scheduled.get('message') or scheduled.get('reason', 'not scheduled')}"
    if status.get("phase") == "Failed" or status.get("reason"):  # as NodeLost, of a pod that was running
        return f"{status.get('reason', 'Failed')}: {status.get('message', 'the pod failed')}"
    return None


def unrecoverable_problems(pods: Iterable[Object]) -> str:
    """Return the problems that waiting does not solve; empty if there are none."""
    problems = [(pod, problem) for pod in pods if not is_finished(pod) and (problem := pod_problem(pod))]
    return "; ".join(
        f"{pod['metadata']['name']}: {text}" for pod, text in problems if text.startswith(_UNRECOVERABLE_REASONS)
    )


def crashed_containers(pods: Iterable[Object]) -> list[tuple[str, str, bool]]:
    """Return pod, container, and whether the log to read is the previous one, for each process that crashed."""
    crashed = []
    for pod in pods:
        for container in _container_statuses(pod.get("status", {})):
            current, previous = (container.get(state, {}).get("terminated", {}) for state in ("state", "lastState"))
            if current.get("exitCode") or previous.get("exitCode"):
                crashed.append((pod["metadata"]["name"], container.get("name", ""), not current.get("exitCode")))
    return crashed


def describe_termination(terminated: Object) -> str:
    reason, code = terminated.get("reason", "an error"), terminated.get("exitCode")
    message = f", {terminated['message'].strip()}" if terminated.get("message") else ""
    hint = "; it needs more memory than its limit" if reason == "OOMKilled" else ""
    return f"the container ended with {reason}, exit code {code}{message}{hint}"


def is_finished(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") in _FINISHED_PHASES


def has_started(pod: Object) -> bool:
    """Return whether the pod has, or had, a log."""
    return pod.get("status", {}).get("phase") not in (None, "Pending")


def pod_rank(pod: Object) -> str:
    """Return the pod's number in its Job; empty without numbers."""
    metadata = pod["metadata"]
    label = metadata.get("labels", {}).get(COMPLETION_INDEX, "")
    return str(metadata.get("annotations", {}).get(COMPLETION_INDEX) or label)


def abandoned_since(pod: Object) -> str:
    """Return since when a pod's node has not reported on it, as the API server writes times; empty if it does.

    A kubelet that takes a pod sets its startTime; the controller of a lost node sets Ready to False and nothing else.
    """
    conditions = read_conditions(pod["status"])
    ready, containers, scheduled = (conditions.get(kind, {}) for kind in ("Ready", "ContainersReady", "PodScheduled"))
    if (ready.get("status"), containers.get("status"), ready.get("reason")) == ("False", "True", None):
        return str(ready["lastTransitionTime"])
    is_taken = "startTime" in pod["status"] or scheduled.get("status") != "True"
    return "" if is_taken else str(scheduled["lastTransitionTime"])


def read_conditions(status: Object) -> dict[str, Object]:
    return {item["type"]: item for item in status.get("conditions", [])}


def _container_statuses(status: Object) -> Iterator[Object]:
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def _belongs_to(pod: Object, job: Object) -> bool:
    """Exclude pods of an earlier Job of the same name; pods of a JobSet or TrainJob belong to Jobs in between."""
    owners = [owner["uid"] for owner in pod["metadata"].get("ownerReferences", []) if owner["kind"] == job["kind"]]
    return not owners or job["metadata"].get("uid") in owners


def _exit_code(pod: Object) -> int:
    """Return the exit code of the container that failed; 0 if none did."""
    states = [item.get("state", {}) for item in pod["status"].get("containerStatuses", [])]
    return next((code for state in states if (code := state.get("terminated", {}).get("exitCode", 0))), 0)
