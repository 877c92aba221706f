"""Mocked pods, which run functions of the tests, and the controllers that create and count them."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .object_store import Object, Store

POD_OWNERS = ("Deployment", "Job", "JobSet", "TrainJob")
REVISION = "deployment.kubernetes.io/revision"
INDEX = "batch.kubernetes.io/job-completion-index"


class MockPod:
    """One pod: the test's program gets it, writes its log, changes its state and returns its exit status."""

    def __init__(self, store: Store, path: str, job: str, index: int) -> None:
        self.store, self.path, self.job, self.index = store, path, job, index
        self.gone = threading.Event()
        self._lines: list[tuple[str, str]] = []
        self.ended = False
        self.runs = False  # as long as its process runs

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[1]

    @property
    def spec(self) -> Object:
        item: Object = self.store.objects[self.path]["spec"]
        return item

    def log(self, line: str, *, stamped: bool = True) -> None:
        """Write a line with a timestamp in nanoseconds, like the kubelet; its own messages have none."""
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{time.time_ns() % 10**9:09d}Z"
        with self.store.changed:
            self._lines.append((stamp if stamped else "", line))
            self.store.changed.notify_all()

    def lines(self, since: str = "") -> list[tuple[str, str]]:
        """Return the lines since a time; the API compares whole seconds."""
        return [pair for pair in self._lines if pair[0][:19] >= since[:19]]

    def status(self, **status: Any) -> None:
        if not self.gone.is_set():
            self.store.set_status(self.path, status)

    def run(self) -> None:
        state = {"state": {"running": {}}, "restartCount": 0, **self._container()}
        self.status(phase="Running", containerStatuses=[state])

    def end(self, code: int, reason: str = "", **more: Any) -> None:
        ended = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
        state = {"state": {"terminated": ended}, "restartCount": 0, **self._container()}
        self.status(phase="Failed" if code else "Succeeded", containerStatuses=[state], **more)

    def close(self) -> None:
        with self.store.changed:
            self.ended = True
            self.store.changed.notify_all()

    def _container(self) -> Object:
        container = self.spec["containers"][0]
        return {"name": container["name"], "image": container["image"], "ready": True}


PodProgram = Callable[[MockPod], int]


class Nodes:
    """Runs the pods of Jobs, each in a thread; logs are kept as long as the pods."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.program: PodProgram = lambda pod: 0
        self.replicas = 0  # default replicas of a Deployment; 0: Deployments have no pods
        self.makes_pods = True
        self.keeps_ended = True  # False: Jobs are deleted as soon as they have ended
        self.pods: dict[str, MockPod] = {}
        self._threads: list[threading.Thread] = []

    def on_apply(self, path: str, item: Object) -> None:
        """Create the pods of an applied Job, once, and as many pods of a Deployment as it has replicas."""
        if item["kind"] == "Deployment":
            self._make_replica_set(path)
        if item["kind"] == "Deployment" and self.replicas:
            self._scale(path, item)
        own = [pod for pod in self.pods.values() if pod.job == path and not pod.gone.is_set()]
        if item["kind"] not in POD_OWNERS[1:] or own or item["spec"].get("suspend") or not self.makes_pods:
            return
        for index in range(self._spec(path)[1].get("completions") or 1):
            self.start(path, index)

    def start(self, path: str, index: int, name: str = "") -> MockPod:
        made, spec = self._spec(path)
        template = copy.deepcopy(spec["template"])
        where = self._pod(f"{path.rpartition('/')[0]}/{made}", index) + name
        while where in self.store.objects:  # an earlier pod still terminates
            where += "-again"
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": made}
        metadata = {"name": where.rsplit("/", 1)[1], "labels": labels, "annotations": {INDEX: str(index)}}
        uid = self.store.objects[path]["metadata"]["uid"]
        own = {"apiVersion": "batch/v1", "kind": "Job", "name": made, "controller": True}
        metadata["ownerReferences"] = [{**own, "uid": uid if path.endswith(made) else str(uuid.uuid4())}]
        pod = MockPod(self.store, where, path, index)
        self.pods[where] = pod
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        self.store.create(where, {**body, "status": {"phase": "Pending"}})
        thread = threading.Thread(target=self._live, args=(pod, path))
        self._threads.append(thread)
        pod.runs = True
        thread.start()
        return pod

    def _spec(self, path: str) -> tuple[str, Object]:
        """Return name and spec of the Job that creates the pods, which may be inside a JobSet or TrainJob."""
        item = self.store.objects[path]
        name = item["metadata"]["name"]
        if item["kind"] == "Job":
            return name, item["spec"]
        if item["kind"] == "TrainJob":
            runtime = f"{path.rpartition('/')[0].removesuffix('trainjobs')}trainingruntimes/{name}"
            item = {"spec": self.store.objects[runtime]["spec"]["template"]["spec"]}
        (inner,) = item["spec"]["replicatedJobs"]
        return f"{name}-{inner['name']}-0", inner["template"]["spec"]

    def _make_replica_set(self, path: str) -> None:
        """Create the ReplicaSet of a new template, and remove those beyond the limit of the history."""
        spec, name = self.store.objects[path]["spec"], path.rsplit("/", 1)[1]
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
        collection = path.replace(f"/deployments/{name}", "/replicasets")
        own = self._replica_sets(path)
        last = max((_revision(self.store.objects[where]) for where in own), default=0)
        metadata = {
            "name": f"{name}-{digest}",
            "labels": {**spec["template"]["metadata"]["labels"], "pod-template-hash": digest},
            "annotations": {REVISION: str(last + 1)},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "controller": True}],
        }
        body = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": metadata,
            "spec": {"template": spec["template"]},
        }
        if (where := f"{collection}/{name}-{digest}") in own:
            self.store.delete(where)
        self.store.create(where, body)
        for old in self._replica_sets(path)[: -1 - spec.get("revisionHistoryLimit", 10)]:
            self.store.delete(old)

    def _replica_sets(self, path: str) -> list[str]:
        """Return the paths of a Deployment's ReplicaSets, the oldest first."""
        name = path.rsplit("/", 1)[1]
        own = [
            where
            for where, item in self.store.objects.items()
            if item["kind"] == "ReplicaSet" and item["metadata"]["ownerReferences"][0]["name"] == name
        ]
        return sorted(own, key=lambda where: _revision(self.store.objects[where]))

    def _scale(self, path: str, item: Object) -> None:
        self._end_pods(path)
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        spec, template = item["spec"]["template"]["spec"], item["spec"]["template"]["metadata"]
        more = {name: template[name] for name in ("labels", "annotations") if name in template}
        for index in range(item["spec"].get("replicas", self.replicas)):
            where = self._pod(path, index)
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": where.rsplit("/", 1)[1], **more}}
            self.store.create(where, {**body, "spec": copy.deepcopy(spec), "status": ready})
            self.pods[where] = MockPod(self.store, where, path, index)

    def on_delete(self, path: str) -> None:
        """Remove the ReplicaSets of a deleted Deployment, and end its pods."""
        if "/deployments/" in path:
            for where in self._replica_sets(path):
                self.store.delete(where)
        self._end_pods(path)

    def _end_pods(self, path: str) -> None:
        """Terminate the pods of a Job or Deployment; they are removed when they have ended."""
        for where, pod in list(self.pods.items()):
            if pod.job == path and not pod.gone.is_set():
                if pod.runs:
                    self.store.change(where, _mark_deleted)
                    pod.gone.set()
                else:
                    self.lose(where)

    def lose(self, where: str) -> None:
        """Remove the pod with its node and its log."""
        pod = self.pods.pop(where)
        pod.gone.set()
        pod.close()
        with self.store.changed:
            if where in self.store.objects:
                self.store.delete(where)

    def close(self) -> None:
        for pod in list(self.pods.values()):
            pod.gone.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "the program of a mocked pod must end when `gone` is set"

    def _live(self, pod: MockPod, job: str) -> None:
        pod.run()
        code = self.program(pod)
        if pod.gone.is_set():
            pod.close()
            return self._reap(pod)
        if code >= 0:
            if self.store.objects[pod.path]["status"]["phase"] not in ("Failed", "Succeeded"):
                pod.end(code)
            self._count(job)
        pod.close()
        with self.store.changed:
            pod.runs = False
        if pod.gone.is_set():
            self._reap(pod)
        return None

    def _reap(self, pod: MockPod) -> None:
        with self.store.changed:
            if self.pods.get(pod.path) is pod:
                self.lose(pod.path)

    def _count(self, path: str) -> None:
        def change(job: Object) -> None:
            pods = [pod for pod in self.pods.values() if pod.job == path]
            phases = [self.store.objects[pod.path]["status"]["phase"] for pod in pods if pod.path in self.store.objects]
            done, failed, wanted = phases.count("Succeeded"), phases.count("Failed"), self._spec(path)[1]
            status: Object = {"succeeded": done, "failed": failed, "active": len(phases) - done - failed}
            if failed:
                reason = {"reason": "PodFailurePolicy", "message": "a container failed with a code that ends the Job"}
                status["conditions"] = [{"type": "Failed", "status": "True", **reason}]
            elif done == (wanted.get("completions") or 1):
                word = "Completed" if job["kind"] == "JobSet" else "Complete"
                status["conditions"] = [{"type": word, "status": "True"}]
            job["status"] = status

        with self.store.changed:
            if path in self.store.objects:
                job = self.store.change(path, change)
                if "conditions" in job["status"] and not self.keeps_ended:
                    self.store.delete(path)

    @staticmethod
    def _pod(job: str, index: int) -> str:
        namespace = job.split("/namespaces/")[1].split("/")[0]
        return f"/api/v1/namespaces/{namespace}/pods/{job.rsplit('/', 1)[1]}-{index}"


def _revision(replica_set: Object) -> int:
    return int(replica_set["metadata"]["annotations"][REVISION])


def _mark_deleted(item: Object) -> None:
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:30Z"
