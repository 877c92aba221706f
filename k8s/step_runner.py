"""Running a pipeline step on a cluster: its objects applied, its pods followed to their end, and all of it removed."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from k8s.cluster.api import (
    TRANSIENT_STATUSES,
    Connection,
    Lines,
    Response,
    StreamBroken,
    Unreachable,
    api_path,
    list_objects,
    plural,
    retry_after_seconds,
)
from k8s.cluster.cluster import DRY_RUN, Report, apply_object, delete_object, patch_object, read_object, select_objects
from k8s.cluster.errors import api_error
from k8s.cluster.pending_reasons import PendingReasons
from k8s.cluster.rollout_status import (
    JobResult,
    has_started,
    is_finished,
    job_progress,
    job_result,
    pod_rank,
    unrecoverable_problems,
)
from k8s.objects.jobs import KEY_LABEL, RUN_LABEL, StepJob
from k8s.objects.kustomize import Object
from k8s.objects.manifests import kubectl_name
from pipeline.system.errors import PipelineError, ResourceError, StageError
from pipeline.system.wording import number

_POD = {"apiVersion": "v1", "kind": "Pod"}
_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
_TICK_SECONDS = 0.1
_LOG_RESPONSE_TIMEOUT_SECONDS = 5.0
_LAST_LOG_LINES_TIMEOUT_SECONDS = 30.0
_UNREACHABLE_TIMEOUT_SECONDS = 60.0
_MAX_POD_NAMES = 3

ObjectsByName = Mapping[str, Object]
Events = queue.SimpleQueue[tuple[str, ObjectsByName]]  # "Job" or "Pod", and all objects of the kind


@dataclass
class StepRunner:
    """Runs one step of one run."""

    connection: Connection
    namespace: str
    step_job: StepJob
    logs: Path  # folder with one file for each pod
    log: Path  # the lines of all pods
    timeout_seconds: float  # for problems that do not resolve themselves, such as an image that does not exist
    report: Report
    tick: Callable[[], None]  # called while waiting, to update what the user sees

    @cached_property
    def _logs(self) -> PodLogs:
        several_pods = self.step_job.pods > 1
        return PodLogs(
            self.connection, self.namespace, self.step_job.container, several_pods, self.logs, self.log, self.report
        )

    @cached_property
    def _pending_reasons(self) -> PendingReasons:
        return PendingReasons(self.connection, self.namespace)

    def find(self) -> Object | None:
        """Return the Job that an earlier `pipe` started for this step and key, whether or not it has ended."""
        return self._own_job(self._list(self.step_job.job))

    def start(self) -> None:
        """Apply all objects, after a dry run of all: a refusal leaves nothing behind.

        What is left of an attempt with another key is removed first.
        """
        self._check_claim()
        self._remove_earlier_attempt()
        for item in self.step_job.objects:
            patch_object(self.connection, item, self.namespace, DRY_RUN)
        try:
            for item in self.step_job.objects:
                apply_object(self.connection, item, self.namespace, self.report)
        except PipelineError:
            try:
                self.remove()
            except PipelineError as error:
                self.report(f"warning: parts of {kubectl_name(self.step_job.job)} are left on the cluster: {error}")
            raise
        self.report(f"started {kubectl_name(self.step_job.job)} in namespace {self.namespace}")

    def follow(self) -> JobResult:
        """Follow the Job to its end, however often the connection breaks."""
        events: Events = queue.SimpleQueue()
        watchers = [self._watch("Job", self.step_job.job, events), self._watch("Pod", _POD, events)]
        try:
            return self._wait_for_end(events, watchers)
        finally:
            for watcher in watchers:
                watcher.close()
            self._close_logs(_TICK_SECONDS)

    def remove(self) -> None:
        """Delete what was created for this step of this run, and nothing else."""
        for item in reversed(self.step_job.objects):
            for live in self._list(item, _UNREACHABLE_TIMEOUT_SECONDS):
                self._delete(live, item)

    def cancel(self) -> None:
        """Delete the Job and wait for its pods, which may save a checkpoint first; keep their last log lines."""
        pods = self._list(_POD)
        self._logs.follow(_pods_by_name(pods))
        self._logs.wait_for_responses(_LOG_RESPONSE_TIMEOUT_SECONDS)
        self.remove()
        try:
            while pods := self._list(_POD, _UNREACHABLE_TIMEOUT_SECONDS):
                self._logs.follow(_pods_by_name(pods))  # also those that had not started at the first call
                self.tick()
                time.sleep(_TICK_SECONDS)
            self._logs.follow({})
        finally:
            self._close_logs(_TICK_SECONDS if pods else _LAST_LOG_LINES_TIMEOUT_SECONDS)

    def _remove_earlier_attempt(self) -> None:
        """Delete the Job of another key and wait for its pods to end: two Jobs would write the same run."""
        self.remove()
        reported = False
        while pods := [pod for pod in self._list(_POD, _UNREACHABLE_TIMEOUT_SECONDS) if not is_finished(pod)]:
            if not reported:
                names = ", ".join(_pod_and_node(pod) for pod in pods[:_MAX_POD_NAMES])
                self.report(f"waiting for pods of an earlier attempt to end: {names}")
                reported = True
            self.tick()
            time.sleep(_TICK_SECONDS)

    def _wait_for_end(self, events: Events, watchers: Sequence[Watcher]) -> JobResult:
        objects_by_kind: dict[str, ObjectsByName] = {}
        reported, stuck_since = "", None
        while True:
            self._read_events(events, objects_by_kind)
            self.tick()
            pods = list(objects_by_kind.get("Pod", {}).values())
            for error in (watcher.error for watcher in watchers if watcher.error):
                raise error
            if "Job" in objects_by_kind and self._result(objects_by_kind["Job"], pods):
                return self._final_result(objects_by_kind["Job"])
            if "Job" in objects_by_kind and "Pod" in objects_by_kind:
                reported = self._report_progress(objects_by_kind["Job"], pods, reported)
            problems = unrecoverable_problems(pods)
            stuck_since = (stuck_since or time.monotonic()) if problems else None
            if stuck_since and time.monotonic() - stuck_since > self.timeout_seconds:
                return JobResult(1, f"{problems}; waited {number(self.timeout_seconds)} s for it")

    def _read_events(self, events: Events, objects_by_kind: dict[str, ObjectsByName]) -> None:
        """Read events until none comes for a moment."""
        try:
            while True:
                kind, objects = events.get(timeout=_TICK_SECONDS)
                if kind == "Job" and self._is_removed_after_end(objects_by_kind, objects):
                    continue
                objects_by_kind[kind] = objects
                if kind == "Pod":
                    self._logs.follow(objects)
        except queue.Empty:
            return

    def _is_removed_after_end(self, objects_by_kind: Mapping[str, ObjectsByName], objects: ObjectsByName) -> bool:
        """Return whether the Job was deleted after it ended: its result is known, so the event is ignored."""
        known_job = self._own_job(objects_by_kind.get("Job", {}).values())
        return (
            known_job is not None and self._own_job(objects.values()) is None and job_result(known_job, []) is not None
        )

    def _report_progress(self, jobs: ObjectsByName, pods: list[Object], reported: str) -> str:
        """Report the progress if it changed; return what was reported last."""
        job = self._own_job(jobs.values())
        assert job is not None  # else `_result` would have returned one
        text = job_progress(job, pods, self.step_job.pods, self._pending_reasons.get(job, pods))
        if text != reported:
            self.report(text)
        return text

    def _final_result(self, jobs: ObjectsByName) -> JobResult:
        """Read all logs to their end, also those of pods that ended before they were seen running."""
        pods = self._list(_POD, _UNREACHABLE_TIMEOUT_SECONDS)
        self._logs.follow(_pods_by_name(pods))
        self._logs.follow({})  # the Job has ended, and so all pods
        self._close_logs(_LAST_LOG_LINES_TIMEOUT_SECONDS)
        result = self._result(jobs, pods)
        assert result is not None
        return result

    def _result(self, jobs: ObjectsByName, pods: list[Object]) -> JobResult | None:
        job = self._own_job(jobs.values())
        if job is None:
            return JobResult(1, f"{kubectl_name(self.step_job.job)} was deleted, but not by this process")
        return job_result(job, pods)

    def _own_job(self, jobs: Iterable[Object]) -> Object | None:
        """Return the Job with our key that is not being deleted."""
        jobs_with_key = (
            job for job in jobs if job["metadata"]["labels"].get(KEY_LABEL) == self.step_job.labels[KEY_LABEL]
        )
        return next((job for job in jobs_with_key if "deletionTimestamp" not in job["metadata"]), None)

    def _watch(self, name: str, kind: Mapping[str, Any], events: Events) -> Watcher:
        on_change = lambda objects: events.put((name, objects))  # noqa: E731
        return Watcher(self.connection, kind, self.namespace, self.step_job.selector, on_change, self.report)

    def _close_logs(self, seconds: float) -> None:
        self._logs.close(seconds)
        self.tick()

    def _check_claim(self) -> None:
        claim = {**_CLAIM, "metadata": {"name": self.step_job.claim}}
        if read_object(self.connection, claim, self.namespace) is None:
            raise ResourceError(
                f"namespace {self.namespace} has no volume claim {self.step_job.claim}, which must hold the folder of "
                "runs here as in the pods; to fix it: docs/kubernetes-training.md describes how to create one"
            )

    def _list(self, kind: Mapping[str, Any], timeout_seconds: float = 0.0) -> list[Object]:
        """List this step's objects; with a timeout, wait for a server that restarts: finished work must not be lost."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return select_objects(self.connection, kind, self.namespace, self.step_job.selector)
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TICK_SECONDS)

    def _delete(self, live: Object, item: Object) -> None:
        """Delete exactly this object, not one that was created under its name meanwhile."""
        if live["metadata"]["labels"].get(RUN_LABEL) != self.step_job.run:
            raise StageError(f"{kubectl_name(live)}: does not belong to run {self.step_job.run}, and is not deleted")
        named = {**item, "metadata": {"name": live["metadata"]["name"]}}
        uid = live["metadata"]["uid"]
        delete_object(self.connection, named, self.namespace, uid, accepted=(404, 409))


def _pods_by_name(pods: Sequence[Object]) -> dict[str, Object]:
    return {pod["metadata"]["name"]: pod for pod in pods}


def _pod_and_node(pod: Object) -> str:
    node = pod["spec"].get("nodeName")
    return f"{pod['metadata']['name']} on node {node}" if node else str(pod["metadata"]["name"])


_WATCH_TIMEOUT_SECONDS = 240
_READ_TIMEOUT_SECONDS = 300.0  # bookmarks come about every minute
_RETRY_PAUSE_SECONDS, _MAX_RETRY_PAUSE_SECONDS = 0.05, 10.0
_FAILURES_BEFORE_REPORT = 3
_HTTP_GONE = 410

OnChange = Callable[[Mapping[str, Object]], None]


class Watcher:
    """Calls `on_change` with all objects by name, first and after each change, in its own thread until it is closed.

    The collection is listed, then watched; it is listed again when the server's history has expired.
    """

    def __init__(
        self,
        connection: Connection,
        kind: Mapping[str, str],
        namespace: str,
        selector: str,
        on_change: OnChange,
        report: Callable[[str], None],
    ) -> None:
        self._connection, self._kind, self._namespace, self._selector = connection, kind, namespace, selector
        self._on_change, self._report = on_change, report
        self._objects: dict[str, Object] = {}
        self._version = ""  # the resourceVersion to watch from; empty: list first
        self._failures = 0  # in a row
        self._retry_after = 0.0  # seconds, requested by the server
        self._closed = threading.Event()
        self._lines: Lines | None = None
        self.error: Exception | None = None  # that no retry would fix; a caller that waits for changes must check it
        self._thread = threading.Thread(target=self._run, name=f"watch {kind['kind']}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._lines is not None:
            self._lines.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._watch() if self._version else self._list()
            except StreamBroken as error:
                self._failures += 1
                if self._failures == _FAILURES_BEFORE_REPORT and not self._closed.is_set():
                    self._report(f"the cluster does not answer ({error}); its pods run on, and pipe tries again")
                pause = min(_RETRY_PAUSE_SECONDS * 2 ** min(self._failures, 10), _MAX_RETRY_PAUSE_SECONDS)
                self._closed.wait(max(pause, self._retry_after))
                self._retry_after = 0.0
            except Exception as error:  # also a bug of ours must not leave the caller waiting for ever
                self.error = error
                return

    def _list(self) -> None:
        try:
            listing = list_objects(self._connection, self._kind, self._namespace, {"labelSelector": self._selector})
        except PipelineError as error:
            raise StreamBroken(str(error)) from error
        if isinstance(listing, Response):
            return self._handle_error(listing)
        self._handle_success()
        self._version = listing.version
        self._objects = {item["metadata"]["name"]: item for item in listing.items}
        self._on_change(dict(self._objects))
        return None

    def _watch(self) -> None:
        query = {"watch": "true", "labelSelector": self._selector, "resourceVersion": self._version}
        query |= {"allowWatchBookmarks": "true", "timeoutSeconds": str(_WATCH_TIMEOUT_SECONDS)}
        lines = self._connection.lines(api_path(self._kind, self._namespace), query, _READ_TIMEOUT_SECONDS)
        if isinstance(lines, Response):
            return self._handle_error(lines)
        self._lines = lines
        if self._closed.is_set():
            return lines.close()
        self._handle_success()
        with contextlib.suppress(StreamBroken):  # the next watch continues from the last version
            self._read_events(lines)
        self._closed.wait(_RETRY_PAUSE_SECONDS)  # not a busy loop if the server ends each stream at once
        return None

    def _read_events(self, lines: Lines) -> None:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError as error:  # a proxy ended the stream in the middle of an event
                raise StreamBroken(f"incomplete event: {line[:80]!r}") from error
            item = event["object"]
            if event["type"] == "ERROR":
                if item.get("code") == _HTTP_GONE:
                    self._version = ""  # the history has expired: list again
                    return
                raise StreamBroken(str(item.get("message")))
            self._version = item["metadata"]["resourceVersion"]
            name = item["metadata"].get("name", "")
            if event["type"] == "DELETED":
                self._objects.pop(name, None)
            elif event["type"] != "BOOKMARK":
                self._objects[name] = item
            if event["type"] != "BOOKMARK":
                self._on_change(dict(self._objects))

    def _handle_success(self) -> None:
        if self._failures >= _FAILURES_BEFORE_REPORT:
            self._report("the cluster answers again")
        self._failures = 0

    def _handle_error(self, response: Response) -> None:
        if response.status == _HTTP_GONE and self._version:
            self._version = ""
        elif response.status in TRANSIENT_STATUSES:
            self._retry_after = retry_after_seconds(response) or 0.0
            raise StreamBroken(f"{response.status}: {response.reason}")
        else:
            subject = f"watching {plural(self._kind['kind'])}"
            raise api_error(response, subject, self._namespace, self._kind["apiVersion"])


_LOG_READ_TIMEOUT_SECONDS = 3600.0  # a step may print nothing for long
_LOG_RETRY_PAUSE_SECONDS, _MAX_LOG_RETRY_PAUSE_SECONDS = 0.1, 5.0
_LINE = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ?(.*)$", re.DOTALL)
# The kubelet sends this, with status 200 and no timestamp, where the container is gone; the container did not write it.
_NO_LOG = (b"unable to retrieve container logs", b"Unable to retrieve container logs")
_HTTP_BAD_REQUEST, _HTTP_NOT_FOUND = 400, 404  # the container has not started; the pod is gone
_HTTP_UNAUTHORIZED_OR_FORBIDDEN = (401, 403)


@dataclass
class PodLogs:
    """Logs of a step's pods, followed while they run: one file for each pod, and one for all together.

    A pod's file keeps the kubelet's timestamps, so that following continues at the right line after any interruption.
    Memory is bounded: lines go to the files as they arrive, and only those of the last second are remembered.
    """

    connection: Connection
    namespace: str
    container: str  # the step's: a service mesh may add others
    several_pods: bool  # whose lines are marked with their rank
    folder: Path  # one file for each pod
    log: Path  # all pods together
    report: Callable[[str], None]
    _followed: dict[str, PodLog] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _reported_error: bool = False

    def follow(self, pods: Mapping[str, Object]) -> None:
        """Follow the logs of all pods that have started; logs of pods that finished or are gone are read to their end.

        `pods` are all there are now, by name.
        """
        for name, pod in pods.items():
            if name not in self._followed and has_started(pod):
                write_line = self._writer(f"[{pod_rank(pod)}] " if self.several_pods else "")
                file = self.folder / f"{name}.log"
                self._followed[name] = PodLog(self.connection, self.namespace, name, self.container, file, write_line)
        for name, log in self._followed.items():
            if name not in pods or is_finished(pods[name]):
                log.finished.set()
        self._report_error(self._followed.values())

    def wait_for_responses(self, seconds: float) -> None:
        """Wait until the server has responded to the requests of all logs."""
        deadline = time.monotonic() + seconds
        for log in self._followed.values():
            log.responded.wait(max(0.0, deadline - time.monotonic()))

    def close(self, seconds: float) -> None:
        """Wait for the ends of all logs, together no longer than this."""
        deadline = time.monotonic() + seconds
        while self._followed:
            log = self._followed.popitem()[1]
            log.close(max(0.0, deadline - time.monotonic()))
            self._report_error([log])

    def _report_error(self, logs: Iterable[PodLog]) -> None:
        """Report only the first error: the logs of the other pods are refused for the same reason."""
        error = next((log.error for log in logs if log.error), "")
        if error and not self._reported_error:
            self.report(f"warning: {error}")
            self._reported_error = True

    def _writer(self, prefix: str) -> Callable[[str], None]:
        return lambda line: self._write(f"{prefix}{line}")

    def _write(self, line: str) -> None:
        with self._writing, self.log.open("ab") as file:
            file.write(line.encode() + b"\n")


class PodLog:
    """Follows one pod's log to its end in its own thread; `write_line` gets each new line."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        pod: str,
        container: str,
        file: Path,
        write_line: Callable[[str], None],
    ) -> None:
        self._connection, self._file, self._write_line = connection, file, write_line
        self._namespace, self._pod = namespace, pod
        self._path = f"{api_path(_POD, namespace, pod)}/log"
        self._query = {"follow": "true", "timestamps": "true", "container": container}
        self._last_second, self._lines_of_last_second = last_second(file)
        self._written = 0  # lines
        self.finished = threading.Event()  # the pod has: following stops once the log has been read to its end
        self.responded = threading.Event()  # the server has: from then on no line is missed if the pod goes away
        self._closed = threading.Event()
        self._lines: Lines | None = None
        self.error = ""  # one that no retry would fix
        self._thread = threading.Thread(target=self._run, name=f"log of {pod}", daemon=True)
        self._thread.start()

    def close(self, wait_seconds: float) -> None:
        """Wait for the end of the log, but not for ever: the pod's node may be gone."""
        self._thread.join(wait_seconds)
        self._closed.set()
        if self._lines is not None:
            self._lines.close()
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            while not self._closed.is_set():
                finished = self.finished.is_set()  # read before the log: only then is its end the end
                lines_before = self._written
                with contextlib.suppress(StreamBroken):
                    if (self._read(file) and finished) or self.error:
                        return
                failures = 0 if self._written > lines_before else failures + 1
                self._closed.wait(min(_LOG_RETRY_PAUSE_SECONDS * 2 ** min(failures, 10), _MAX_LOG_RETRY_PAUSE_SECONDS))

    def _read(self, file: BinaryIO) -> bool:
        """Read the log from the last known second; return whether its current end was reached."""
        since = {"sinceTime": self._last_second} if self._last_second else {}
        try:
            lines = self._connection.lines(self._path, self._query | since, _LOG_READ_TIMEOUT_SECONDS)
        finally:
            self.responded.set()
        if isinstance(lines, Response):
            if lines.status in (_HTTP_NOT_FOUND, _HTTP_BAD_REQUEST):
                return True
            if lines.status in _HTTP_UNAUTHORIZED_OR_FORBIDDEN:
                self.error = str(api_error(lines, f"the log of pod/{self._pod}", self._namespace))
                return False
            raise StreamBroken(lines.reason)
        self._lines = lines
        repeated = Counter(self._lines_of_last_second)  # `sinceTime` has whole seconds, so some lines come again
        if self._closed.is_set():
            lines.close()
        for line in lines:
            if line.startswith(_NO_LOG):
                continue
            if repeated[line]:
                repeated[line] -= 1
            else:
                self._keep(line, file)
        return True

    def _keep(self, line: bytes, file: BinaryIO) -> None:
        file.write(line + b"\n")
        file.flush()
        self._written += 1
        second, text = split_timestamp(line)
        if second != self._last_second:
            self._last_second = second
            self._lines_of_last_second.clear()
        self._lines_of_last_second[line] += 1
        self._write_line(text)


def split_timestamp(line: bytes) -> tuple[str, str]:
    """Return the second in which a line was written, and its text."""
    match = _LINE.match(line)
    if match is None:
        return "", line.decode(errors="replace")
    return (match[1] + match[2]).decode(), match[3].decode(errors="replace")


def last_second(file: Path) -> tuple[str, Counter[bytes]]:
    """Return the second of the last line in a file and all lines of that second; cut off an incomplete last line."""
    if not file.exists():
        return "", Counter()
    data = file.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    if complete != data:
        os.truncate(file, len(complete))
    lines = complete.split(b"\n")[:-1]  # not splitlines(): progress bars contain \r
    second = split_timestamp(lines[-1])[0] if lines else ""
    return second, Counter(line for line in lines if split_timestamp(line)[0] == second)
