"""Running a step on a cluster: its objects applied, its pods followed to their end, and all of it removed again."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8s.api import Connection, Unreachable, path_of
from k8s.job_state import Ending, ending, hopeless, over, progress, rank_of, started
from k8s.jobs import KEY, RUN, Work
from k8s.manifest import Object, label
from k8s.podlog import PodLog
from k8s.refusal import refusal
from k8s.watch import Watcher
from pipeline.spec.errors import ResourceError, StageError

Say = Callable[[str], None]

_JOB = {"apiVersion": "batch/v1", "kind": "Job"}
_POD = {"apiVersion": "v1", "kind": "Pod"}
_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
_APPLY = {"fieldManager": "pipe", "fieldValidation": "Strict"}
_TICK_SECONDS = 0.1
_LAST_WORDS_SECONDS = 30.0
_PATIENCE_SECONDS = 60.0
_PASSING = (429, 500, 502, 503, 504)


@dataclass
class Engine:
    """For one step of one run."""

    connection: Connection
    namespace: str
    work: Work
    logs: Path  # folder that keeps what each pod said
    log: Path  # what they all say, as it comes
    timeout_seconds: float  # for what the cluster cannot get
    say: Say
    tick: Callable[[], None]
    _followed: dict[str, PodLog] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def find(self) -> Object | None:
        """The Job of an earlier `pipe` for this very step, which goes on, or has ended meanwhile."""
        found = self._list(_JOB)
        return next((job for job in found if job["metadata"]["labels"].get(KEY) == self.work.labels[KEY]), None)

    def start(self) -> None:
        """All are tried first, so that a refusal leaves nothing behind; then applied."""
        self._check_claim()
        for dry in ({"dryRun": "All"}, {}):
            for item in self.work.objects:
                self._apply(item, {**_APPLY, **dry})
        self.say(f"started {label(self.work.job)} in namespace {self.namespace}")

    def follow(self) -> Ending:
        """To the end of the Job, whatever happens to the connection."""
        events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]] = queue.SimpleQueue()
        watchers = [self._watcher(kind, events) for kind in (_JOB, _POD)]
        try:
            return self._wait(events, watchers)
        finally:
            for watcher in watchers:
                watcher.close()
            self._close_logs(_TICK_SECONDS)

    def remove(self) -> None:
        """What was made for this step of this run, and nothing else."""
        for item in reversed(self.work.objects):
            for live in self._list(item, _PATIENCE_SECONDS):
                self._delete(live, item)

    def cancel(self) -> None:
        """Pods are asked to end, and may: training makes a checkpoint. Their last words are kept."""
        pods = self._list(_POD)
        self._follow_logs({pod["metadata"]["name"]: pod for pod in pods})
        self.remove()
        try:
            while pods := self._list(_POD):
                self.tick()
                time.sleep(_TICK_SECONDS)
            self._follow_logs({})
        finally:
            self._close_logs(_TICK_SECONDS if pods else _LAST_WORDS_SECONDS)

    def _wait(self, events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]], watchers: list[Watcher]) -> Ending:
        seen: dict[str, Mapping[str, Object]] = {}
        said, stuck_since = "", None
        while True:
            said = self._take(events, seen, said)
            self.tick()
            pods = list(seen.get("Pod", {}).values())
            for error in (watcher.error for watcher in watchers if watcher.error):
                raise error
            if "Job" in seen and self._found(seen["Job"], pods):
                return self._ended(seen["Job"])
            stuck = hopeless(pods)
            stuck_since = (stuck_since or time.monotonic()) if stuck else None
            if stuck_since and time.monotonic() - stuck_since > self.timeout_seconds:
                return Ending(1, f"{stuck}; this does not mend itself (jobs.timeout_seconds={self.timeout_seconds:g})")

    def _take(self, events: Any, seen: dict[str, Mapping[str, Object]], said: str) -> str:
        """What is new, until a moment passes without news; returns what was last said of it."""
        try:
            while True:
                kind, items = events.get(timeout=_TICK_SECONDS)
                seen[kind] = items
                if kind == "Pod":
                    self._follow_logs(items)
                if "Job" in seen and (job := self._own(seen["Job"])):
                    text = progress(job, list(seen.get("Pod", {}).values()))
                    if text != said:
                        self.say(text)
                        said = text
        except queue.Empty:
            return said

    def _ended(self, jobs: Mapping[str, Object]) -> Ending:
        """With what its pods say at last, the quick ones too that were never seen to run."""
        pods = self._list(_POD, _PATIENCE_SECONDS)
        self._follow_logs({pod["metadata"]["name"]: pod for pod in pods})
        for log in self._followed.values():
            log.pod_is_over()
        self._close_logs(_LAST_WORDS_SECONDS)
        found = self._found(jobs, pods)
        assert found is not None
        return found

    def _found(self, jobs: Mapping[str, Object], pods: list[Object]) -> Ending | None:
        job = self._own(jobs)
        if job is None:
            return Ending(1, f"{label(self.work.job)} was deleted by somebody else")
        return ending(job, pods)

    def _own(self, jobs: Mapping[str, Object]) -> Object | None:
        return next((job for job in jobs.values() if job["metadata"]["labels"][KEY] == self.work.labels[KEY]), None)

    def _watcher(self, kind: Mapping[str, str], events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]]) -> Watcher:
        path, name = path_of(kind, self.namespace), kind["kind"]
        return Watcher(self.connection, path, self.work.selector, lambda items: events.put((name, items)), self.say)

    def _follow_logs(self, pods: Mapping[str, Object]) -> None:
        many = self.work.job["spec"].get("completions", 1) > 1
        for name, pod in pods.items():
            if name not in self._followed and started(pod):
                mark = f"[{rank_of(pod)}] " if many else ""
                container = pod["spec"]["containers"][0]["name"]
                tell = _marked(mark, self._write)
                file = self.logs / f"{name}.log"
                self._followed[name] = PodLog(self.connection, self.namespace, name, container, file, tell)
        for name, log in self._followed.items():
            if name not in pods or over(pods[name]):
                log.pod_is_over()

    def _write(self, line: str) -> None:
        with self._writing, self.log.open("ab") as file:
            file.write(line.encode() + b"\n")

    def _close_logs(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._followed:
            self._followed.popitem()[1].close(max(0.0, deadline - time.monotonic()))
        self.tick()

    def _check_claim(self) -> None:
        answer = self.connection.request("GET", path_of(_CLAIM, self.namespace, self.work.claim))
        if answer.status == 404:
            raise ResourceError(
                f"namespace {self.namespace} has no volume claim {self.work.claim}, on which the folder of runs must "
                "stand, here as in the pods; docs/kubernetes.md says how to make one"
            )
        if not answer.ok:
            raise refusal(answer, f"persistentvolumeclaim/{self.work.claim}", self.namespace)

    def _list(self, kind: Mapping[str, Any], patience_seconds: float = 0.0) -> list[Object]:
        """With patience where the work is done already and must not be lost for a server that restarts."""
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                return self._listed(kind)
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TICK_SECONDS)

    def _listed(self, kind: Mapping[str, Any]) -> list[Object]:
        answer = self.connection.request("GET", path_of(kind, self.namespace), {"labelSelector": self.work.selector})
        if answer.status in _PASSING:
            raise Unreachable(f"listing {kind['kind']}s: the API server answers {answer.status}: {answer.reason}")
        if not answer.ok:
            raise refusal(answer, f"listing {kind['kind']}s", self.namespace, kind["apiVersion"])
        return [{**item, "kind": kind["kind"], "apiVersion": kind["apiVersion"]} for item in answer.json()["items"]]

    def _apply(self, item: Object, query: dict[str, str]) -> None:
        path, body = path_of(item, self.namespace, item["metadata"]["name"]), json.dumps(item).encode()
        answer = self.connection.request("PATCH", path, query, body, "application/apply-patch+yaml")
        if not answer.ok:
            raise refusal(answer, label(item), self.namespace, item["apiVersion"])

    def _delete(self, live: Object, item: Object) -> None:
        """This one object: were it made anew by somebody meanwhile, its uid would be another."""
        if live["metadata"]["labels"].get(RUN) != self.work.run:
            raise StageError(f"{label(live)}: is not of run {self.work.run}; it is left alone")
        options = {"preconditions": {"uid": live["metadata"]["uid"]}, "propagationPolicy": "Background"}
        path = path_of(item, self.namespace, live["metadata"]["name"])
        answer = self.connection.request("DELETE", path, body=json.dumps(options).encode())
        if not answer.ok and answer.status not in (404, 409):
            raise refusal(answer, label(live), self.namespace)


def _marked(mark: str, write: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: write(f"{mark}{line}")
