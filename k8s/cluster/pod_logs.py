"""A pod's log, kept in a file line by line with the kubelet's times, so that following it can be taken up anywhere.

The logs of all pods of a step: each kept in a file of its own, and all of them together as they come.
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

from k8s.cluster.api import Answer, Broken, Connection, Lines, path_of
from k8s.cluster.errors import refusal
from k8s.cluster.rollout_status import over, rank_of, started
from k8s.objects.kustomize import Object

_POD = {"apiVersion": "v1", "kind": "Pod"}
_SILENCE_SECONDS = 3600.0  # a step may have nothing to say for long
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0
_LINE = re.compile(rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d) ?(.*)$", re.DOTALL)
_NOT_STARTED, _NOT_THERE = 400, 404
_NOT_ALLOWED = (401, 403)


class PodLog:
    """Follows one pod in a thread of its own, to the end of its log; `tell` gets each new line."""

    def __init__(
        self, connection: Connection, namespace: str, pod: str, container: str, file: Path, tell: Callable[[str], None]
    ) -> None:
        self._connection, self._file, self._tell = connection, file, tell
        self._namespace, self._pod = namespace, pod
        self._path = f"{path_of(_POD, namespace, pod)}/log"
        self._query = {"follow": "true", "timestamps": "true", "container": container}
        self._since, self._known = last_second(file)
        self._kept = 0  # lines
        self._over, self._closed, self._asked = threading.Event(), threading.Event(), threading.Event()
        self._lines: Lines | None = None
        self.refused = ""  # why no second try would bring it
        self._thread = threading.Thread(target=self._follow, name=f"log of {pod}", daemon=True)
        self._thread.start()

    def pod_is_over(self) -> None:
        """It ended or is gone: the log has an end."""
        self._over.set()

    def wait_for_an_answer(self, seconds: float) -> None:
        """Until the API gives the log, or says why not: what is said from then on is heard, however soon it ends."""
        self._asked.wait(seconds)

    def close(self, wait_seconds: float) -> None:
        """Wait for the end of the log, but not for ever: its node may be gone."""
        self._thread.join(wait_seconds)
        self._closed.set()
        if self._lines is not None:
            self._lines.close()
        self._thread.join()

    def _follow(self) -> None:
        failures = 0
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            while not self._closed.is_set():
                over = self._over.is_set()  # asked before: what it says after that is its last word
                kept = self._kept
                with contextlib.suppress(Broken):  # it is asked for again
                    if (self._read(file) and over) or self.refused:
                        return
                failures = 0 if self._kept > kept else failures + 1
                self._closed.wait(min(_PAUSE_SECONDS * 2 ** min(failures, 10), _LONGEST_PAUSE_SECONDS))

    def _read(self, file: BinaryIO) -> bool:
        """Whether the log was read to where it ends now."""
        since = {"sinceTime": self._since} if self._since else {}
        try:
            found = self._connection.lines(self._path, self._query | since, _SILENCE_SECONDS)
        finally:
            self._asked.set()
        if isinstance(found, Answer):
            if found.status in (_NOT_THERE, _NOT_STARTED):
                return True
            if found.status in _NOT_ALLOWED:
                self.refused = str(refusal(found, f"the log of pod/{self._pod}", self._namespace))
                return False
            raise Broken(found.reason)
        self._lines = found
        again = Counter(self._known)  # the API tells by the second what is after a time
        if self._closed.is_set():
            found.close()
        for line in found:
            if again[line]:
                again[line] -= 1
            else:
                self._keep(line, file)
        return True

    def _keep(self, line: bytes, file: BinaryIO) -> None:
        file.write(line + b"\n")
        file.flush()
        self._kept += 1
        second, text = split(line)
        if second != self._since:
            self._since = second
            self._known.clear()
        self._known[line] += 1
        self._tell(text)


def split(line: bytes) -> tuple[str, str]:
    """The second a line was written in, and what it says."""
    found = _LINE.match(line)
    if found is None:
        return "", line.decode(errors="replace")
    return (found[1] + found[2]).decode(), found[3].decode(errors="replace")


def last_second(file: Path) -> tuple[str, Counter[bytes]]:
    """The second of the last line that is kept, and all lines of that second; a half-written line is thrown away."""
    if not file.exists():
        return "", Counter()
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(file, len(whole))
    lines = whole.split(b"\n")[:-1]  # not at the \r of a progress bar
    second = split(lines[-1])[0] if lines else ""
    return second, Counter(line for line in lines if split(line)[0] == second)


@dataclass
class PodLogs:
    connection: Connection
    namespace: str
    container: str  # ours: a mesh may put others beside it
    several: bool  # pods, told apart by their rank
    folder: Path  # keeps what each pod said
    log: Path  # what they all say
    say: Callable[[str], None]
    _followed: dict[str, PodLog] = field(default_factory=dict)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _said: str = ""

    def follow(self, pods: Mapping[str, Object]) -> None:
        """Those that have begun to say something; of those that are over or gone, what is left of it."""
        for name, pod in pods.items():
            if name not in self._followed and started(pod):
                tell = self._marked(f"[{rank_of(pod)}] " if self.several else "")
                file = self.folder / f"{name}.log"
                self._followed[name] = PodLog(self.connection, self.namespace, name, self.container, file, tell)
        for name, log in self._followed.items():
            if name not in pods or over(pods[name]):
                log.pod_is_over()
        self._tell_refusals(self._followed.values())

    def wait_for_answers(self, seconds: float) -> None:
        """All of them together no longer than this."""
        deadline = time.monotonic() + seconds
        for log in self._followed.values():
            log.wait_for_an_answer(max(0.0, deadline - time.monotonic()))

    def finish(self) -> None:
        """No pod says anything any more."""
        for log in self._followed.values():
            log.pod_is_over()

    def close(self, seconds: float) -> None:
        """Wait for what is left, all of them together no longer than this."""
        deadline = time.monotonic() + seconds
        while self._followed:
            log = self._followed.popitem()[1]
            log.close(max(0.0, deadline - time.monotonic()))
            self._tell_refusals([log])

    def _tell_refusals(self, logs: Iterable[PodLog]) -> None:
        """Once: what one pod's log is refused for, the others' are as well."""
        refused = next((log.refused for log in logs if log.refused), "")
        if refused and not self._said:
            self.say(f"warning: {refused}")
            self._said = refused

    def _marked(self, mark: str) -> Callable[[str], None]:
        return lambda line: self._write(f"{mark}{line}")

    def _write(self, line: str) -> None:
        with self._writing, self.log.open("ab") as file:
            file.write(line.encode() + b"\n")
