"""Decides from a Job, JobSet or TrainJob and its pods how the work stands, and how it ended; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k8s.manifest import Object
from k8s.rollout import pod_trouble

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
