"""Logs of a step's pods, followed while they run: one file for each pod, and one for all together.

A pod's file keeps the kubelet's timestamps, so that following continues at the right line after any interruption.
Memory is bounded: lines go to the files as they arrive, and only those of the last second are remembered.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from k8s.cluster.api import Connection, Lines, Response, StreamBroken, api_path
from k8s.cluster.errors import api_error
from k8s.cluster.rollout_status import has_started, is_finished, pod_rank
from k8s.objects.kustomize import Object

_POD = {"apiVersion": "v1", "kind": "Pod"}
_READ_TIMEOUT_SECONDS = 3600.0  # a step may print nothing for long
_RETRY_PAUSE_SECONDS, _MAX_RETRY_PAUSE_SECONDS = 0.1, 5.0
_LINE = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ?(.*)$", re.DOTALL)
# The kubelet sends this, with status 200 and no timestamp, where the container is gone; the container did not write it.
_NO_LOG = (b"unable to retrieve container logs", b"Unable to retrieve container logs")
_HTTP_BAD_REQUEST, _HTTP_NOT_FOUND = 400, 404  # the container has not started; the pod is gone
_HTTP_UNAUTHORIZED_OR_FORBIDDEN = (401, 403)


@dataclass
class PodLogs:
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
                self._closed.wait(min(_RETRY_PAUSE_SECONDS * 2 ** min(failures, 10), _MAX_RETRY_PAUSE_SECONDS))

    def _read(self, file: BinaryIO) -> bool:
        """Read the log from the last known second; return whether its current end was reached."""
        since = {"sinceTime": self._last_second} if self._last_second else {}
        try:
            lines = self._connection.lines(self._path, self._query | since, _READ_TIMEOUT_SECONDS)
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
