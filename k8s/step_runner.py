"""Running a step on a cluster: its objects applied, its pods followed to their end, and all of it removed again."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from k8s.cluster.api import PASSING, Answer, Connection, Unreachable, listed, path_of, warnings_of
from k8s.cluster.errors import Reasons, refusal
from k8s.cluster.pod_logs import PodLogs
from k8s.cluster.rollout_status import Ending, ending, hopeless, over, progress
from k8s.cluster.watch import Watcher
from k8s.objects.jobs import KEY, RUN, Work
from k8s.objects.kustomize import Object
from k8s.objects.manifests import label
from pipeline.contract.errors import PipelineError, ResourceError, StageError

Say = Callable[[str], None]

_POD = {"apiVersion": "v1", "kind": "Pod"}
_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
_APPLY = {"fieldManager": "pipe", "fieldValidation": "Strict"}
_TICK_SECONDS = 0.1
_ANSWER_SECONDS = 5.0  # of the API, when it is asked for logs
_LAST_WORDS_SECONDS = 30.0
_PATIENCE_SECONDS = 60.0
_MOST_NAMES = 3


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

    @cached_property
    def _logs(self) -> PodLogs:
        several = self.work.pods > 1
        return PodLogs(self.connection, self.namespace, self.work.container, several, self.logs, self.log, self.say)

    @cached_property
    def _reasons(self) -> Reasons:
        return Reasons(self.connection, self.namespace)

    def find(self) -> Object | None:
        """The Job of an earlier `pipe` for this very step, which goes on, or has ended meanwhile."""
        return self._own(self._list(self.work.job))

    def start(self) -> None:
        """All are tried first, so that a refusal leaves nothing behind; then applied. Nothing of before goes on."""
        self._check_claim()
        self._clear()
        for item in self.work.objects:
            self._apply(item, {**_APPLY, "dryRun": "All"})
        try:
            for item in self.work.objects:
                for warning in self._apply(item, _APPLY):
                    self.say(f"warning: {label(item)}: {warning}")
        except PipelineError:
            self._take_back()
            raise
        self.say(f"started {label(self.work.job)} in namespace {self.namespace}")

    def follow(self) -> Ending:
        """To the end of the Job, whatever happens to the connection."""
        events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]] = queue.SimpleQueue()
        watchers = [self._watcher(name, kind, events) for name, kind in (("Job", self.work.job), ("Pod", _POD))]
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
        self._logs.follow(_by_name(pods))
        self._logs.wait_for_answers(_ANSWER_SECONDS)
        self.remove()
        try:
            while pods := self._list(_POD, _PATIENCE_SECONDS):
                self._logs.follow(_by_name(pods))  # one that was just beginning has words too
                self.tick()
                time.sleep(_TICK_SECONDS)
            self._logs.follow({})
        finally:
            self._close_logs(_TICK_SECONDS if pods else _LAST_WORDS_SECONDS)

    def _clear(self) -> None:
        """What another key left goes, and its pods have ended: two would write the same run."""
        self.remove()
        said = False
        while pods := [pod for pod in self._list(_POD, _PATIENCE_SECONDS) if not over(pod)]:
            if not said:
                names = ", ".join(_placed(pod) for pod in pods[:_MOST_NAMES])
                self.say(f"waiting for pods of an earlier attempt to end: {names}")
                said = True
            self.tick()
            time.sleep(_TICK_SECONDS)

    def _take_back(self) -> None:
        """Half of the objects would be in nobody's way, but they are ours."""
        try:
            self.remove()
        except PipelineError as error:
            self.say(f"warning: what was applied of {label(self.work.job)} is left on the cluster: {error}")

    def _wait(self, events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]], watchers: list[Watcher]) -> Ending:
        seen: dict[str, Mapping[str, Object]] = {}
        said, stuck_since = "", None
        while True:
            self._take(events, seen)
            self.tick()
            pods = list(seen.get("Pod", {}).values())
            for error in (watcher.error for watcher in watchers if watcher.error):
                raise error
            if "Job" in seen and self._found(seen["Job"], pods):
                return self._ended(seen["Job"])
            if "Job" in seen and "Pod" in seen:
                said = self._tell(seen["Job"], pods, said)
            stuck = hopeless(pods)
            stuck_since = (stuck_since or time.monotonic()) if stuck else None
            if stuck_since and time.monotonic() - stuck_since > self.timeout_seconds:
                return Ending(1, f"{stuck}; this does not mend itself (jobs.timeout_seconds={self.timeout_seconds:g})")

    def _take(self, events: Any, seen: dict[str, Mapping[str, Object]]) -> None:
        """What is new, until a moment passes without news; an end that is taken away at once is still the end."""
        try:
            while True:
                kind, items = events.get(timeout=_TICK_SECONDS)
                if kind == "Job" and self._ended_before(seen, items):
                    continue
                seen[kind] = items
                if kind == "Pod":
                    self._logs.follow(items)
        except queue.Empty:
            return

    def _ended_before(self, seen: Mapping[str, Mapping[str, Object]], items: Mapping[str, Object]) -> bool:
        """A cluster may keep what has ended for no time at all (`cluster.keep_seconds=0`)."""
        before = self._own(seen.get("Job", {}).values())
        return before is not None and self._own(items.values()) is None and ending(before, []) is not None

    def _tell(self, jobs: Mapping[str, Object], pods: list[Object], said: str) -> str:
        """How it stands, where that has changed; returns what was last said."""
        job = self._own(jobs.values())
        assert job is not None  # else it had been found to have ended
        text = progress(job, pods, self.work.pods, self._reasons.of(job, pods))
        if text != said:
            self.say(text)
        return text

    def _ended(self, jobs: Mapping[str, Object]) -> Ending:
        """With what its pods say at last, the quick ones too that were never seen to run."""
        pods = self._list(_POD, _PATIENCE_SECONDS)
        self._logs.follow({pod["metadata"]["name"]: pod for pod in pods})
        self._logs.finish()
        self._close_logs(_LAST_WORDS_SECONDS)
        found = self._found(jobs, pods)
        assert found is not None
        return found

    def _found(self, jobs: Mapping[str, Object], pods: list[Object]) -> Ending | None:
        job = self._own(jobs.values())
        if job is None:
            return Ending(1, f"{label(self.work.job)} was deleted by somebody else")
        return ending(job, pods)

    def _own(self, jobs: Iterable[Object]) -> Object | None:
        """Not one that is about to be gone."""
        mine = (job for job in jobs if job["metadata"]["labels"].get(KEY) == self.work.labels[KEY])
        return next((job for job in mine if "deletionTimestamp" not in job["metadata"]), None)

    def _watcher(
        self, name: str, kind: Mapping[str, Any], events: queue.SimpleQueue[tuple[str, Mapping[str, Object]]]
    ) -> Watcher:
        see = lambda items: events.put((name, items))  # noqa: E731 - it has no name of its own
        return Watcher(self.connection, kind, self.namespace, self.work.selector, see, self.say)

    def _close_logs(self, seconds: float) -> None:
        self._logs.close(seconds)
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
        found = listed(self.connection, kind, self.namespace, {"labelSelector": self.work.selector})
        if not isinstance(found, Answer):
            return found.items
        if found.status in PASSING:
            raise Unreachable(f"listing {kind['kind']}s: the API server answers {found.status}: {found.reason}")
        raise refusal(found, f"listing {kind['kind']}s", self.namespace, kind["apiVersion"])

    def _apply(self, item: Object, query: dict[str, str]) -> list[str]:
        """What the cluster has to remark."""
        path, body = path_of(item, self.namespace, item["metadata"]["name"]), json.dumps(item).encode()
        answer = self.connection.request("PATCH", path, query, body, "application/apply-patch+yaml")
        if not answer.ok:
            raise refusal(answer, label(item), self.namespace, item["apiVersion"])
        return warnings_of(answer)

    def _delete(self, live: Object, item: Object) -> None:
        """This one object: were it made anew by somebody meanwhile, its uid would be another."""
        if live["metadata"]["labels"].get(RUN) != self.work.run:
            raise StageError(f"{label(live)}: is not of run {self.work.run}; it is left alone")
        options = {"preconditions": {"uid": live["metadata"]["uid"]}, "propagationPolicy": "Background"}
        path = path_of(item, self.namespace, live["metadata"]["name"])
        answer = self.connection.request("DELETE", path, body=json.dumps(options).encode())
        if not answer.ok and answer.status not in (404, 409):
            raise refusal(answer, label(live), self.namespace)


def _by_name(pods: Sequence[Object]) -> dict[str, Object]:
    return {pod["metadata"]["name"]: pod for pod in pods}


def _placed(pod: Object) -> str:
    node = pod["spec"].get("nodeName")
    return f"{pod['metadata']['name']} on node {node}" if node else str(pod["metadata"]["name"])
